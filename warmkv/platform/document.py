"""The Serve document: what `warmkv serve` starts locally and what a RayService carries as `serveConfigV2`."""

from __future__ import annotations

from typing import Any

from warmkv.config import Config

IMPORT_PATH = "warmkv.platform.application:build"

NOT_ON_THE_HEAD = {"warmkv-node": "!head"}
"""Where gateways run: on all nodes but those with that label, as the manifests give it to the head. Whoever asks the
other nodes does not notice when the head goes."""


def serve_document(config: Config) -> dict[str, Any]:
    """Return the document for a configuration; settings at their defaults are left out."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.gateway.host, "port": config.gateway.port},
        "applications": [
            {
                "name": config.cluster.application,
                "route_prefix": config.gateway.route_prefix,
                "import_path": IMPORT_PATH,
                "args": config.model_dump(mode="json", exclude_defaults=True),
            }
        ],
    }

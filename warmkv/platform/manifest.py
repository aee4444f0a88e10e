"""What of a Kubernetes manifest is written from a configuration, never by hand: the Serve document, and the model."""

from __future__ import annotations

from pathlib import Path

import yaml

from warmkv.config import load
from warmkv.platform.document import serve_document
from warmkv.platform.listening import check_listening

NAME = "warmkv"  # of the RayService that the patch applies to
MODEL = "warmkv/model"
"""Annotation of the head's pod with the model.

A document that changes is deployed in the pods that run: gateways would tokenize for the other model, and init
containers fetch nothing. A pod that changes has KubeRay start a new cluster.
"""


class _Block(str):
    """Text that YAML shows as a block, so that a diff of the manifest can be read."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def manifest(config_path: Path) -> str:
    """Render a kustomize patch that puts a configuration file's Serve document, and its model, into the RayService.

    The environment is left out, so that the same file gives the same manifest everywhere. Raises ConfigError.
    """
    config = load(config_path, environ={})
    check_listening(config.gateway)
    document, model = serve_document(config), config.model
    named = f"{model.path}@{model.revision}" if model.revision else model.path
    patch = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME},
        "spec": {
            "serveConfigV2": _Block(yaml.safe_dump(document, sort_keys=False)),
            "rayClusterConfig": {"headGroupSpec": {"template": {"metadata": {"annotations": {MODEL: named}}}}},
        },
    }
    head = f"# Written by `warmkv k8s render` from {config_path.name}: change that file and render again.\n"
    return head + yaml.dump(patch, Dumper=_Dumper, sort_keys=False, width=120)


def render(config_path: Path, manifest_path: Path) -> bool:
    """Write the patch of a configuration; returns whether the file was changed. Raises ConfigError and OSError."""
    text = manifest(config_path)
    if manifest_path.exists() and manifest_path.read_text(encoding="utf-8") == text:
        return False
    manifest_path.write_text(text, encoding="utf-8")
    return True

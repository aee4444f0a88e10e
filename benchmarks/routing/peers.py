"""The routers of Ray Serve that ours is raced against, as Serve loads them in the gateway."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.config import RequestRouterConfig

from warmkv.config import Config
from warmkv.platform.router import PrefixRouter

AFFINITY_IMBALANCE = 10  # requests in flight beyond which load counts more than prefixes; by default it never does


class AffinityRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Serve's prefix router, which looks for text in what is sent; a token is a character, which spares it work."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        return "".join(map(chr, pending_request.args[0].request.token_ids))


def router(name: str, config: Config) -> RequestRouterConfig:
    """Return the router of a contestant."""
    if name == "prefix_cost":
        settings = config.model_dump(mode="json", exclude_defaults=True)
        return RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"settings": settings})
    if name == "affinity":
        return RequestRouterConfig(
            request_router_class=AffinityRouter, request_router_kwargs={"imbalanced_threshold": AFFINITY_IMBALANCE}
        )
    return RequestRouterConfig()  # power of two choices

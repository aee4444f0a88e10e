"""How the KV cache of a request is compressed."""

from __future__ import annotations

from pydantic import Field

from warmkv.config.base import Section
from warmkv.policy_spec import PolicySpec


class CompressionConfig(Section):
    policy: PolicySpec = Field(
        PolicySpec(), description="what requests keep of their KV cache; short form as in snapkv@0.2"
    )
    allow_request_policy: bool = Field(True, description="whether a request may name its own policy")

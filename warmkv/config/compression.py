"""How the KV cache of a request is compressed."""

from __future__ import annotations

from pydantic import Field

from warmkv.config.base import Section
from warmkv.policy_spec import PolicySpec


class CompressionConfig(Section):
    policy: PolicySpec = PolicySpec()
    allow_request_policy: bool = Field(True, description="whether a request may name its own policy")

"""Compression policies: what of a prompt's KV survives the hand-off to decode, and where new tokens go.

`build(spec)` turns configuration into a policy. Importing this package needs no torch; building does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from warmkv.config import PolicySpec

if TYPE_CHECKING:
    from warmkv.policies.compression.base import Policy

# name -> class, one file a method
_REGISTRY = {
    "full": "full.Full",
    "streaming_llm": "streaming_llm.StreamingLLM",
    "snapkv": "snapkv.SnapKV",
}


def build(spec: PolicySpec | str) -> Policy:
    """The policy that a spec (or its short form, as in `"snapkv@0.2"`) describes."""
    spec = PolicySpec.model_validate(spec)
    module, _, name = _REGISTRY[spec.name].partition(".")
    policy: Policy = getattr(import_module(f"{__name__}.{module}"), name)(spec)
    return policy

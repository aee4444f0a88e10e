"""Compression policies: what of a prompt's KV survives the hand-off to decode, and where new tokens go.

`build(spec)` turns configuration into a policy, `kept_positions` shows what a policy keeps of a prompt. Importing this
package needs no torch; building does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from warmkv.policy_spec import PolicyName, PolicySpec

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.base import Policy
    from warmkv.policies.compression.prefill_state import TokenClasses

# name -> class, one file a method
_REGISTRY: dict[PolicyName, str] = {
    "full": "full.Full",
    "window": "window.Window",
    "streaming_llm": "streaming_llm.StreamingLLM",
    "h2o": "h2o.H2O",
    "snapkv": "snapkv.SnapKV",
    "pyramidkv": "pyramidkv.PyramidKV",
    "adakv": "adakv.AdaKV",
    "tova": "tova.TOVA",
    "knorm": "knorm.KNorm",
    "keydiff": "keydiff.KeyDiff",
    "expected_attention": "expected_attention.ExpectedAttention",
    "rocketkv": "rocketkv.RocketKV",
    "fastgen": "fastgen.FastGen",
    "cake": "cake.Cake",
    "adaptive": "adaptive.Adaptive",
    "auto": "auto.Auto",
}


def build(spec: PolicySpec | str) -> Policy:
    """The policy that a spec (or its short form, as in `"snapkv@0.2"`) describes. Raises ValueError for a wrong one."""
    spec = PolicySpec.model_validate(spec)
    module, _, name = _REGISTRY[spec.name].partition(".")
    policy: Policy = getattr(import_module(f"{__name__}.{module}"), name)(spec)
    return policy


def kept_positions(
    model: Any,
    input_ids: Tensor | Sequence[int],
    policy: Policy | PolicySpec | str,
    *,
    classes: TokenClasses | None = None,
) -> list[Tensor]:
    """What each layer keeps of a prompt: int64 [kv_heads, n], ascending, padded with -1 where heads differ.

    `model` is a transformers causal LM (or one that warmkv has loaded), `input_ids` the tokens of one prompt, [T] or
    [1, T]; `classes` says which tokens are special, for fastgen and shotkv. The model is left as it was.
    """
    from warmkv.policies.compression.observe import compute_prompt

    built = build(policy) if isinstance(policy, PolicySpec | str) else policy
    prompt = compute_prompt(model, input_ids, built.spec, classes=classes)
    return [selection.positions for selection in built.select(prompt)]

"""Compression policies: what of a prompt's KV survives the hand-off to decode, and where new tokens go.

`build(spec)` turns configuration into a policy, `kept_positions` shows what a policy keeps of a prompt. Importing this
package needs no torch; building does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.method import Method
    from warmkv.policies.compression.prefill_state import TokenClasses
    from warmkv.policy_spec import PolicySpec


def build(spec: PolicySpec | str) -> Method:
    """Return the method of a spec (or of its short form, as in `"snapkv@0.2"`). Raises ValueError for a wrong one."""
    from warmkv.policy_spec import PolicySpec

    return PolicySpec.model_validate(spec).method


def kept_positions(
    model: Any,
    input_ids: Tensor | Sequence[int],
    policy: Method | PolicySpec | str,
    *,
    classes: TokenClasses | None = None,
) -> list[Tensor]:
    """Compute what each layer keeps of a prompt: int64 [kv_heads, n], ascending, padded with -1 where heads differ.

    `model` is a transformers causal LM (or one that warmkv has loaded), `input_ids` the tokens of one prompt, [T] or
    [1, T]; `classes` says which tokens are special, for fastgen and shotkv. The model is left as it was.
    """
    from warmkv.policies.compression.method import Method
    from warmkv.policies.compression.observe import compute_prompt

    built = policy if isinstance(policy, Method) else build(policy)
    prompt = compute_prompt(model, input_ids, built.spec, classes=classes)
    return [selection.positions for selection in built.select(prompt)]

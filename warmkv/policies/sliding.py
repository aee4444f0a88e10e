"""Rows of layers with a sliding window, which attend to the newest tokens only. Pure, as slot sizes are.

A row that would hold the whole window is a ring of just that many entries; one with a smaller budget keeps what the
policy selects inside the window, and entries that have left it are masked out by their age.
"""

from __future__ import annotations

from typing import Any

from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec


def configured_windows(text: Any) -> tuple[int, ...]:
    """Return the window of every layer by a model's configuration, 0: none; () if no layer has one."""
    window, kinds = getattr(text, "sliding_window", None) or 0, getattr(text, "layer_types", None)
    kinds = kinds or ["sliding_attention"] * text.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds) if window else ()


def slides(window: int, prompt_tokens: int, new_tokens: int) -> bool:
    """Return whether a layer's window, 0 for none, leaves any token of a request behind."""
    return 0 < window < prompt_tokens + max(0, new_tokens - 1)


def in_window(kept: int, window: int, prompt_tokens: int, new_tokens: int) -> int:
    """Clip a number of prompt tokens to what a layer with a window can keep."""
    return min(kept, window) if slides(window, prompt_tokens, new_tokens) else kept


def holds_window(spec: PolicySpec, window: int, prompt_tokens: int) -> bool:
    """Return whether a policy's rows grow to a whole window: those that append do, or have a budget as large."""
    budget = budgets.resolve_budget(spec, prompt_tokens)
    return spec.decode == "append" or budget is None or budget >= window


def in_layer(spec: PolicySpec, window: int, prompt_tokens: int, new_tokens: int) -> PolicySpec:
    """Return the policy by which a layer's rows decode: a ring protects nothing that would leave the window at once."""
    spec = budgets.resolve_auto(spec, prompt_tokens)
    if not slides(window, prompt_tokens, new_tokens):
        return spec
    if holds_window(spec, window, prompt_tokens):
        return PolicySpec(name="window", budget=window, **spec.stored_as)
    return spec.model_copy(update={"sinks": 0, "protect": 0.0}) if spec.decode == "ring" else spec


def row_limit(spec: PolicySpec, kept: int, prompt_tokens: int, new_tokens: int, window: int) -> int:
    """Return the entries that a KV head which kept `kept` of the prompt ever needs in a layer.

    Storage that is packed in groups evicts a whole group at a time, and needs a group more to hold a window.
    """
    spec = budgets.resolve_auto(spec, prompt_tokens)
    if not slides(window, prompt_tokens, new_tokens):
        return budgets.slot_limit(spec, kept, prompt_tokens, new_tokens)
    appended = kept + max(0, new_tokens - 1)
    if holds_window(spec, window, prompt_tokens):
        return min(appended, window + spec.storage_format.group - 1)
    if kept < min(prompt_tokens, window):
        return kept
    budget = budgets.resolve_budget(spec, prompt_tokens)
    assert budget is not None
    return min(max(budget, kept), appended)

"""Budgets matched in bytes: how many tokens each policy may keep so that all of them take the same memory.

Pure. Bytes are those that a slot may have in use until its answer ends: entries in their storage format with what
belongs to them (scores and ages of argmin, the sinks' second copy, bounds of pages, a packed row's tail); a layer with
a sliding window has no more than that holds. What size classes add on top is an allocator's rounding and is left out,
so that no method profits from where a class ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from warmkv.policies import budgets, sliding
from warmkv.policies.slot_sizes import KVShape, RowKind, layer_row_kind, packed_limit, row_bytes
from warmkv.policy_spec import PolicySpec


def full_bytes(shape: KVShape, prompt_tokens: int, new_tokens: int) -> int:
    """Return bytes of the uncompressed cache as it is served; the last new token is never written."""
    return planned_bytes(PolicySpec(), shape, prompt_tokens, new_tokens)


def exact_bytes(
    spec: PolicySpec, shape: KVShape, kept: Iterable[Sequence[int]], prompt_tokens: int, new_tokens: int
) -> int:
    """Return bytes that a slot may have in use while `new_tokens` are decoded.

    kept: entries that survive the hand-off, for every layer those of its KV heads. With `new_tokens` of 1 it is what
    is in use right after the hand-off.
    """
    spec = budgets.resolve_auto(spec, prompt_tokens)
    rows = Counter((of_head, shape.window(layer)) for layer, heads in enumerate(kept) for of_head in heads)
    return sum(
        count * row_bytes(_exact_kind(spec, of_head, prompt_tokens, new_tokens, window), shape)
        for (of_head, window), count in rows.items()
    )


def planned_bytes(spec: PolicySpec, shape: KVShape, prompt_tokens: int, new_tokens: int) -> int:
    """Return the bytes as planned before the prompt is computed; where what heads keep follows from the content, as if
    all kept alike.
    """
    spec = budgets.in_force(spec, prompt_tokens, new_tokens)
    kept = [
        [sliding.in_window(of_layer, shape.window(layer), prompt_tokens, new_tokens)] * shape.kv_heads
        for layer, of_layer in enumerate(budgets.layer_budgets(spec, prompt_tokens, shape.layers))
    ]
    return exact_bytes(spec, shape, kept, prompt_tokens, new_tokens)


def _exact_kind(spec: PolicySpec, kept: int, prompt_tokens: int, new_tokens: int, window: int) -> RowKind:
    """Return the row kind of exactly the entries it needs: whole pages and whole packed groups, no size class."""
    kind, limit = layer_row_kind(spec, kept, prompt_tokens, new_tokens, window)
    if kind.segment:
        return replace(kind, capacity=-(-limit // kind.segment) * kind.segment)
    if kind.grouped:
        inside = sliding.in_layer(spec, window, prompt_tokens, new_tokens)
        return replace(kind, capacity=kind.front + packed_limit(inside, limit) + kind.tail)
    return replace(kind, capacity=limit)


def has_budget(spec: PolicySpec) -> bool:
    """Return whether a policy has one; memory of the others follows from the prompt, and is measured once."""
    return spec.method.has_budget


def smallest_budget(spec: PolicySpec) -> int:
    """Return tokens below which a policy does not work: two, and one beside its sinks."""
    return max(2, (spec.sinks or 0) + 1)


def with_budget(spec: PolicySpec, tokens: int) -> PolicySpec:
    return spec.model_copy(update={"budget": tokens})


def allowed_bytes(shape: KVShape, prompt_tokens: int, new_tokens: int, share: float) -> int:
    """Return `share` of the full cache's bytes, rounded down to a byte."""
    return int(share * full_bytes(shape, prompt_tokens, new_tokens) + 1e-6)


def match(spec: PolicySpec, shape: KVShape, prompt_tokens: int, new_tokens: int, allowed: int) -> PolicySpec | None:
    """Find the largest budget in tokens that takes at most `allowed` bytes; None if none is small enough."""

    def fits(tokens: int) -> bool:
        return planned_bytes(with_budget(spec, tokens), shape, prompt_tokens, new_tokens) <= allowed

    least = smallest_budget(spec)
    most = max(prompt_tokens + max(0, new_tokens - 1), least)  # with it nothing is ever given up
    # A row that holds a whole window has no ages and scores: bytes grow with the budget up to a window, and from it on
    for low in sorted({least, *shape.windows}, reverse=True):
        if least <= low <= most and (tokens := largest(fits, low, most)) is not None:
            return with_budget(spec, tokens)
    return None


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Bisect for the largest number from `low` to `high` that fits; None if `low` does not.

    Where `fits` is not quite monotone (a pyramid's rounding), one that fits and whose successor does not.
    """
    if not fits(low):
        return None
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""What a policy keeps, in tokens, before anything is computed. Pure: the simulator and admission share it."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warmkv.policy_spec import PolicySpec


def in_force(spec: PolicySpec, prompt_tokens: int, new_tokens: int) -> PolicySpec:
    """Return the policy that a request runs under: `auto` resolved, the full cache where nothing would be evicted."""
    spec = resolve_auto(spec, prompt_tokens)
    budget = _budget(spec, prompt_tokens)
    appended = max(0, new_tokens - 1) if spec.decode != "append" else 0
    if budget is None or prompt_tokens + appended > budget or _is_compressed(spec, prompt_tokens):
        return spec
    return whole(spec)


def whole(spec: PolicySpec) -> PolicySpec:
    """Return the full cache in the storage of a policy."""
    return made("full", 1.0, **spec.stored_as)


@lru_cache(maxsize=256)
def made(name: str, budget: float, **knobs: Any) -> PolicySpec:
    """Build a substitute policy, cached: few are used by many requests, and validating one is slow."""
    from warmkv.policy_spec import PolicySpec  # which reads the methods, and they this module

    return PolicySpec(name=name, budget=budget, **knobs)


def resolve_auto(spec: PolicySpec, prompt_tokens: int) -> PolicySpec:
    """Resolve `auto` for this prompt length; return any other policy as it is."""
    return spec.method.resolve(prompt_tokens) if spec.method.delegates else spec


def resolve_budget(spec: PolicySpec, prompt_tokens: int) -> int | None:
    """Return the tokens a KV head keeps of a prompt on average, or None if the policy has no budget.

    A share is taken of the prompt and rounded up, and never below the smallest budget that the method can work with.
    """
    return _budget(resolve_auto(spec, prompt_tokens), prompt_tokens)


# The same three questions of a policy that `resolve_auto` has returned: the simulator asks them of every request


def _budget(spec: PolicySpec, prompt_tokens: int) -> int | None:
    if not spec.method.has_budget:
        return None
    if isinstance(spec.budget, int):
        return spec.budget
    return max((spec.sinks or 0) + 1, share(spec.budget, prompt_tokens))


def _kept(spec: PolicySpec, prompt_tokens: int) -> int:
    budget = _budget(spec, prompt_tokens)
    return prompt_tokens if budget is None or budget >= prompt_tokens else spec.method.kept(budget, prompt_tokens)


def _is_compressed(spec: PolicySpec, prompt_tokens: int) -> bool:
    return spec.method.selects_all_lengths(prompt_tokens) or _kept(spec, prompt_tokens) < prompt_tokens


def share(part: float, tokens: int) -> int:
    """Return `part` of some tokens, rounded up: 0.07 * 100 is 7.000000000000001 in floats and must give 7, not 8."""
    return math.ceil(part * tokens - 5e-7)


def kept_tokens(spec: PolicySpec, prompt_tokens: int) -> int:
    """Return the tokens per KV head and layer that survive the hand-off, the average where layers or heads differ.

    Of methods that decide by the prompt's content (fastgen, adaptive) it is the most they may keep.
    """
    return _kept(resolve_auto(spec, prompt_tokens), prompt_tokens)


def is_compressed(spec: PolicySpec, prompt_tokens: int) -> bool:
    """Return whether the hand-off selects at all: a prompt within its budget is left as it is."""
    return _is_compressed(resolve_auto(spec, prompt_tokens), prompt_tokens)


def layer_budgets(spec: PolicySpec, prompt_tokens: int, layers: int) -> list[int]:
    """Return the tokens per KV head that each layer keeps, the average or the most where `follows_content`."""
    kept, differing = _by_layer(spec, prompt_tokens, layers)
    return [kept] * layers if differing is None else differing


def layer_counts(spec: PolicySpec, prompt_tokens: int, layers: int) -> dict[int, int]:
    """Count the layers that keep each number of tokens per KV head."""
    kept, differing = _by_layer(spec, prompt_tokens, layers)
    return {kept: layers} if differing is None else Counter(differing)


def _by_layer(spec: PolicySpec, prompt_tokens: int, layers: int) -> tuple[int, list[int] | None]:
    """Return what a KV head keeps on average, and in each layer; None where all layers keep that."""
    spec = resolve_auto(spec, prompt_tokens)
    kept = _kept(spec, prompt_tokens)
    return kept, spec.method.layer_budgets(kept, prompt_tokens, layers) if kept < prompt_tokens else None


def with_room(spec: PolicySpec, layers: list[int], kept: int) -> list[int]:
    """Return layer budgets, all the same where a ring would find no room behind its sinks in one of them."""
    cramped = spec.decode == "ring" and min(layers) <= (spec.sinks or 0)
    return [kept] * len(layers) if cramped else layers


def follows_content(spec: PolicySpec, prompt_tokens: int) -> bool:
    """Return whether what each layer or KV head keeps is known only after the prompt is computed."""
    spec = resolve_auto(spec, prompt_tokens)
    return spec.method.follows_content and _is_compressed(spec, prompt_tokens)


def segment_tokens(spec: PolicySpec, prompt_tokens: int) -> int:
    """Return the tokens of a segment of which only the promising are read while decoding; 0 reads everything."""
    spec = resolve_auto(spec, prompt_tokens)
    budget = _budget(spec, prompt_tokens) if spec.method.reads_segments else None
    return 0 if budget is None or budget >= prompt_tokens else spec.method.segment(budget, prompt_tokens)


def read_limit(spec: PolicySpec, prompt_tokens: int, head_dim: int) -> tuple[int, int]:
    """Return the entries that a step may read, and the channels by which it chooses segments; 0 without segments."""
    spec = resolve_auto(spec, prompt_tokens)
    budget = _budget(spec, prompt_tokens) if segment_tokens(spec, prompt_tokens) else None
    return (0, 0) if budget is None else spec.method.read_limit(budget, prompt_tokens, head_dim)


def slot_limit(spec: PolicySpec, kept: int, prompt_tokens: int, new_tokens: int) -> int:
    """Return the entries that a KV head which kept `kept` of the prompt ever needs while `new_tokens` are decoded.

    The last new token is never written to the cache: nothing attends to it.
    """
    spec = resolve_auto(spec, prompt_tokens)
    appended = kept + max(0, new_tokens - 1)
    if spec.decode == "append":
        return appended
    if kept < prompt_tokens:  # the budget is used up: every new token takes the place of another
        return kept
    budget = _budget(spec, prompt_tokens)
    assert budget is not None
    return min(max(budget, kept), appended)


def is_endless(spec: PolicySpec, prompt_tokens: int, new_tokens: int, most: int) -> bool:
    """Return whether decoding may go on beyond `most` positions: those of a streaming cache are bounded by its size.

    Half of them at most, so that keys are turned back once in their life at most and lose no precision.
    """
    return spec.method.rebased and 2 * slot_capacity(spec, prompt_tokens, new_tokens) <= most


def slot_capacity(spec: PolicySpec, prompt_tokens: int, new_tokens: int) -> int:
    """Return the entries per KV head and layer that a request needs, the average where layers or heads differ."""
    spec = resolve_auto(spec, prompt_tokens)
    return slot_limit(spec, _kept(spec, prompt_tokens), prompt_tokens, new_tokens)


def recomputed_tokens(spec: PolicySpec, prompt_tokens: int) -> int:
    """Return the tokens at the end of a prompt that must be computed even if their KV is cached.

    At least one, for the first logits; a rule that looks at the last queries needs those that it looks at.
    """
    return max(1, observed_queries(spec, prompt_tokens))


def observed_queries(spec: PolicySpec, prompt_tokens: int) -> int:
    """Return how many queries at the prompt's end are observed: they decide what is kept, or initial scores."""
    spec = resolve_auto(spec, prompt_tokens)
    return spec.method.observed_queries(prompt_tokens, _is_compressed(spec, prompt_tokens))


def needs_column_sums(spec: PolicySpec, prompt_tokens: int) -> bool:
    """Return whether the rule needs the attention that every token received from all queries of the prompt."""
    spec = resolve_auto(spec, prompt_tokens)
    return spec.method.needs_column_sums(_is_compressed(spec, prompt_tokens))


def protected_entries(spec: PolicySpec, limit: int) -> int:
    """Return the entries of a row that are reserved at each end of its sequence, of those that may be in use.

    A share rounded down, at least 4 (the author's code for arXiv 2605.18053), and at most half of the row.
    """
    return min(max(4, math.floor(spec.protect * limit + 5e-7)), limit // 2) if spec.protect else 0


def recent_entries(spec: PolicySpec, limit: int) -> int:
    """Return the newest entries of a row that argmin never gives up, of those that may be in use."""
    recent = limit - math.floor(limit * spec.heavy) if spec.heavy is not None else 1
    protected = protected_entries(spec, limit)
    return max(min(recent, limit - protected), protected)

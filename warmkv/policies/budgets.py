"""What a policy keeps, in tokens, before anything is computed. Pure: the simulator and admission share it."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import Any

from warmkv.policy_spec import PROTECT, RESIDUAL, PolicyName, PolicySpec, Storage

SHORT, MEDIUM, LONG = 8_192, 32_768, 131_072
REASONING_FLOOR = 0.3


def in_force(spec: PolicySpec, prompt_tokens: int, new_tokens: int) -> PolicySpec:
    """Return the policy that a request runs under: `auto` resolved, the full cache where nothing would be evicted."""
    spec = resolve_auto(spec, prompt_tokens)
    budget = resolve_budget(spec, prompt_tokens)
    appended = max(0, new_tokens - 1) if spec.decode != "append" else 0
    if spec.name == "adaptive" and is_compressed(spec, prompt_tokens):
        return spec
    if budget is not None and prompt_tokens + appended <= budget:
        return _whole(spec)
    return spec


def _whole(spec: PolicySpec) -> PolicySpec:
    """Return the full cache in the storage of a policy."""
    return _made("full", 1.0, spec.storage, residual=spec.residual if spec.storage.startswith("kivi") else RESIDUAL)


@lru_cache(maxsize=256)
def _made(name: PolicyName, budget: float, storage: Storage, **knobs: Any) -> PolicySpec:
    """Build a substitute policy, cached: few are used by many requests, and validating one is slow."""
    return PolicySpec(name=name, budget=budget, storage=storage, **knobs)


def resolve_auto(spec: PolicySpec, prompt_tokens: int) -> PolicySpec:
    """Resolve `auto` for this prompt length; return any other policy as it is.

    The literature's advice to operators: nothing below 8K tokens; half of the prompt until 32K, by H2O where its column
    sums are affordable and by SnapKV elsewhere; SnapKV with a wide window until 128K; quantisation on top beyond.
    Reasoning never gets below 30%, and both ends of the prompt (system prompt and question) are protected.
    """
    if spec.name != "auto":
        return spec
    if prompt_tokens < SHORT:
        return _whole(spec)
    storage: Storage = "kivi4" if spec.storage == "model" and prompt_tokens > LONG else spec.storage
    common: dict[str, Any] = {"shots": spec.task == "few_shot", "protect": PROTECT}
    if storage.startswith("kivi"):
        common["residual"] = spec.residual
    lossy = REASONING_FLOOR if spec.task == "reasoning" else 0.0
    if prompt_tokens <= MEDIUM:
        assert spec.scoring is not None
        if column_sums_share(prompt_tokens) <= spec.scoring:
            return _made("h2o", 0.5, storage, **common)
        return _made("snapkv", 0.5, storage, window=64, **common)
    if prompt_tokens <= LONG:
        return _made("snapkv", max(0.2, lossy), storage, window=64, **common)
    return _made("snapkv", max(0.1, lossy), storage, window=128, **common)


def column_sums_share(prompt_tokens: int, hidden: int = 4096) -> float:
    """Return the time that column sums add to a prompt's prefill on a GPU, as a share of it; `hidden` is the width.

    Of a token and layer, prefill takes 24 hidden^2 operations for the weights and 2 hidden T for attention, in 16 bits.
    Column sums write, mask, normalise and add up hidden / 128 heads * T / 2 logits in float32: 24 bytes each, and a
    byte takes as long as 185 operations (an H100 at half of its peak, its memory at 0.8). Window votes read as much
    once for `window` queries, so their share is w / T of this.
    """
    return 17 * prompt_tokens / (24 * hidden + 2 * prompt_tokens)


def resolve_budget(spec: PolicySpec, prompt_tokens: int) -> int | None:
    """Tokens a KV head keeps of a prompt on average, or None if the policy has no budget.

    A share is taken of the prompt and rounded up, and never below the smallest budget that the method can work with.
    """
    spec = resolve_auto(spec, prompt_tokens)
    if spec.name in ("full", "fastgen"):
        return None
    if isinstance(spec.budget, int):
        return spec.budget
    smallest = (spec.sinks or 0) + 1 if spec.decode == "ring" or spec.name == "expected_attention" else 1
    return max(smallest, share(spec.budget, prompt_tokens))


def share(part: float, tokens: int) -> int:
    """`part` of some tokens, rounded up: 0.07 * 100 is 7.000000000000001 in floats and must give 7, not 8."""
    return math.ceil(part * tokens - 5e-7)


def kept_tokens(spec: PolicySpec, prompt_tokens: int) -> int:
    """Tokens per KV head and layer that survive the hand-off, the average where layers or heads differ.

    Of methods that decide by the prompt's content (fastgen, adaptive) it is the most they may keep.
    """
    spec = resolve_auto(spec, prompt_tokens)
    budget = resolve_budget(spec, prompt_tokens)
    if budget is None or budget >= prompt_tokens:
        return prompt_tokens
    return rocket_kept(budget, prompt_tokens) if spec.name == "rocketkv" else budget


def is_compressed(spec: PolicySpec, prompt_tokens: int) -> bool:
    """Whether the hand-off selects at all: a prompt within its budget is left as it is."""
    spec = resolve_auto(spec, prompt_tokens)
    if spec.name == "adaptive" and prompt_tokens > (spec.window or 0):
        return True
    return spec.name == "fastgen" or kept_tokens(spec, prompt_tokens) < prompt_tokens


def layer_budgets(spec: PolicySpec, prompt_tokens: int, layers: int) -> list[int]:
    """Tokens per KV head that each layer keeps, the average or the most where `follows_content`."""
    spec = resolve_auto(spec, prompt_tokens)
    kept = kept_tokens(spec, prompt_tokens)
    if spec.name == "pyramidkv" and kept < prompt_tokens:
        assert spec.window is not None
        assert spec.beta is not None
        return with_room(spec, pyramid(kept, spec.window, prompt_tokens, layers, spec.beta), kept)
    return [kept] * layers


def layer_counts(spec: PolicySpec, prompt_tokens: int, layers: int) -> dict[int, int]:
    """How many layers keep how many tokens per KV head."""
    if spec.name == "pyramidkv":
        return Counter(layer_budgets(spec, prompt_tokens, layers))
    return {kept_tokens(spec, prompt_tokens): layers}


def with_room(spec: PolicySpec, layers: list[int], kept: int) -> list[int]:
    """Layer budgets, all the same where a ring would find no room behind its sinks in one of them."""
    cramped = spec.decode == "ring" and min(layers) <= (spec.sinks or 0)
    return [kept] * len(layers) if cramped else layers


def follows_content(spec: PolicySpec, prompt_tokens: int) -> bool:
    """Whether what each layer or KV head keeps is known only after the prompt is computed."""
    spec = resolve_auto(spec, prompt_tokens)
    return spec.name in ("adakv", "cake", "fastgen", "adaptive") and is_compressed(spec, prompt_tokens)


def pyramid(budget: int, window: int, tokens: int, layers: int, beta: int) -> list[int]:
    """Entries per layer, falling from the first to the last (PyramidKV, arXiv 2406.02069, section 4.2).

    All layers keep the same of a prompt shorter than twice the budget, windows aside, as in the authors' code. The step
    is rounded down, by which the paper's formula would exceed layers * budget; the excess is taken off every layer
    evenly, so that the total never does.
    """
    if budget <= window or layers == 1 or tokens < 2 * (budget - window):
        return [budget] * layers
    least = (budget - window) // beta
    most = 2 * (budget - window) - least
    if most >= tokens - window:
        most = tokens - window
        least = 2 * (budget - window) - most
    step, rest = divmod(most - least, layers - 1)
    return [most - -(-rest // 2) - layer * step + window for layer in range(layers)]


def rocket_kept(budget: int, tokens: int) -> int:
    """Entries that RocketKV's first stage keeps: T / cr^alpha with cr = T / budget (arXiv 2502.14051, section 3.4)."""
    ratio = tokens / budget
    alpha = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    return min(tokens, math.ceil(round(tokens / math.pow(ratio, alpha), 6)))


def rocket_page(budget: int, tokens: int) -> int:
    """Tokens in a page of RocketKV's second stage: ceil(sqrt(cr2)), cr2 what the first stage left of the ratio."""
    return math.ceil(math.sqrt(Fraction(rocket_kept(budget, tokens), min(budget, tokens))))


def slot_limit(spec: PolicySpec, kept: int, prompt_tokens: int, new_tokens: int) -> int:
    """Entries that a KV head which kept `kept` of the prompt ever needs while `new_tokens` are decoded.

    The last new token is never written to the cache: nothing attends to it.
    """
    spec = resolve_auto(spec, prompt_tokens)
    appended = kept + max(0, new_tokens - 1)
    if spec.decode == "append":
        return appended
    if kept < prompt_tokens:  # the budget is used up: every new token takes the place of another
        return kept if new_tokens > 1 else min(kept, appended)
    budget = resolve_budget(spec, prompt_tokens)
    assert budget is not None
    return min(max(budget, kept), appended)


def is_endless(spec: PolicySpec, prompt_tokens: int, new_tokens: int, most: int) -> bool:
    """Whether decoding may go on beyond `most` positions: those of a streaming cache are bounded by its size.

    Half of them at most, so that keys are turned back once in their life at most and lose no precision.
    """
    return spec.name == "streaming_llm" and 2 * slot_capacity(spec, prompt_tokens, new_tokens) <= most


def slot_capacity(spec: PolicySpec, prompt_tokens: int, new_tokens: int) -> int:
    """Entries per KV head and layer that a request needs, the average where layers or heads differ."""
    return slot_limit(spec, kept_tokens(spec, prompt_tokens), prompt_tokens, new_tokens)


def recomputed_tokens(spec: PolicySpec, prompt_tokens: int) -> int:
    """Tokens at the end of a prompt that must be computed even if their KV is cached.

    At least one, for the first logits; a rule that looks at the last queries needs those that it looks at.
    """
    return max(1, observed_queries(spec, prompt_tokens))


def observed_queries(spec: PolicySpec, prompt_tokens: int) -> int:
    """Return how many queries at the prompt's end are observed: they decide what is kept, or initial scores."""
    spec = resolve_auto(spec, prompt_tokens)
    if spec.name == "tova":
        return 1
    if spec.window is None or not is_compressed(spec, prompt_tokens):
        return 0
    if spec.name == "expected_attention":
        return min(spec.window, prompt_tokens)
    return spec.window if spec.window < kept_tokens(spec, prompt_tokens) else 0


def needs_column_sums(spec: PolicySpec, prompt_tokens: int) -> bool:
    """Whether the rule needs the attention that every token received from all queries of the prompt."""
    spec = resolve_auto(spec, prompt_tokens)
    if spec.name == "h2o":
        return is_compressed(spec, prompt_tokens) or spec.decode == "argmin"
    return spec.name == "fastgen"


def protected_entries(spec: PolicySpec, limit: int) -> int:
    """Return the entries of a row that are reserved at each end of its sequence, of those that may be in use.

    A share rounded down, at least 4 (the author's code for arXiv 2605.18053), and at most half of the row.
    """
    return min(max(4, math.floor(spec.protect * limit + 5e-7)), limit // 2) if spec.protect else 0


def keeps_alike(spec: PolicySpec) -> bool:
    """Return whether all KV heads of a layer keep the same tokens, chosen by the scores of all heads together."""
    return spec.name == "tova" and not spec.per_head


def recent_entries(spec: PolicySpec, limit: int) -> int:
    """Newest entries of a row that argmin never gives up, of those that may be in use."""
    recent = limit - math.floor(limit * spec.heavy) if spec.heavy is not None else 1
    return max(recent, protected_entries(spec, limit))

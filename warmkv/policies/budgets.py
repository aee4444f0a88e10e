"""What a policy keeps, in tokens and bytes, before anything is computed. Pure: the simulator and admission share it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from warmkv.config import PolicySpec


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of a model's KV cache: a token takes keys and values in every layer and KV head."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


def resolve_budget(spec: PolicySpec, prompt_tokens: int) -> int | None:
    """Tokens a KV head keeps of a prompt, or None if the policy keeps everything.

    A share is taken of the prompt and rounded up, and never below the smallest budget that the method can work with.
    """
    if spec.name == "full":
        return None
    if isinstance(spec.budget, int):
        return spec.budget
    smallest = spec.sinks + 1 if spec.name == "streaming_llm" else 1
    share = round(spec.budget * prompt_tokens, 6)  # 0.07 * 100 is 7.000000000000001 and must give 7, not 8
    return max(smallest, math.ceil(share))


def kept_tokens(spec: PolicySpec, prompt_tokens: int) -> int:
    """Tokens per KV head and layer that survive the hand-off from prefill to decode."""
    budget = resolve_budget(spec, prompt_tokens)
    return prompt_tokens if budget is None else min(budget, prompt_tokens)


def slot_capacity(spec: PolicySpec, prompt_tokens: int, new_tokens: int) -> int:
    """Entries per KV head and layer that a request ever needs while decoding `new_tokens`.

    The last new token is never written to the cache: nothing attends to it.
    """
    appended = max(0, new_tokens - 1)
    if spec.name == "streaming_llm":
        budget = resolve_budget(spec, prompt_tokens)
        assert budget is not None
        return min(budget, prompt_tokens + appended)
    return kept_tokens(spec, prompt_tokens) + appended


def size_class(capacity: int) -> int:
    """Entries that a slot of at least `capacity` gets: a quarter power of two, at most a quarter too large."""
    step = max(16, (1 << max(0, capacity.bit_length() - 1)) // 4)
    return -(-capacity // step) * step


def ring_sinks(spec: PolicySpec) -> int:
    """First entries of a slot that a ring never overwrites; 0 where new tokens are only appended."""
    return spec.sinks if spec.name == "streaming_llm" else 0


def slot_bytes(shape: KVShape, capacity: int, sinks: int) -> int:
    """Bytes of a slot of `capacity` entries; a ring keeps the original keys of its sinks beside them."""
    return capacity * shape.token_bytes + sinks * shape.token_bytes // 2


def recomputed_tokens(spec: PolicySpec, prompt_tokens: int) -> int:
    """Tokens at the end of a prompt that must be computed even if their KV is cached.

    At least one, for the first logits; a rule that looks at the last queries needs those that it looks at.
    """
    return max(1, observed_queries(spec, prompt_tokens))


def observed_queries(spec: PolicySpec, prompt_tokens: int) -> int:
    """Queries at the end of a prompt that decide what is kept; 0 if nothing or only the window is."""
    decides = spec.name == "snapkv" and spec.window < kept_tokens(spec, prompt_tokens) < prompt_tokens
    return spec.window if decides else 0

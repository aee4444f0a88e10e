"""Which steps a profile measures. Pure; tokens and context as the simulator counts them (`costs.PhaseCosts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmkv.policies import budgets
from warmkv.policies.slot_sizes import KVShape, slot_bytes, workspace_bytes
from warmkv.policy_spec import PolicySpec

CHUNK_PARTS = (8, 4, 2, 1)
"""Chunks are measured whole and as these parts of the largest: the last one of a prompt may be any."""
SHARES = (0.5, 0.25)
"""Of the prompt, that policies with a budget keep."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill step: `tokens` positions, the last of them `end` - 1."""

    tokens: int
    end: int


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step of `batch` sequences that all had such a prompt."""

    batch: int
    prompt: int
    share: float  # of the prompt, that a policy with a budget keeps

    def spec(self, spec: PolicySpec) -> PolicySpec:
        """Return the policy at this share; one without a budget as it is."""
        has_budget = budgets.resolve_budget(spec, self.prompt) is not None
        return spec.model_copy(update={"budget": self.share}) if has_budget else spec

    def kept(self, spec: PolicySpec) -> int:
        return budgets.kept_tokens(self.spec(spec), self.prompt)

    def context(self, spec: PolicySpec, steps: Sequence[int], new_tokens: int) -> float:
        """Return entries that the whole batch holds in these steps, counted from 1, on average."""
        capacity, kept = budgets.slot_capacity(self.spec(spec), self.prompt, new_tokens), self.kept(spec)
        return self.batch * sum(min(capacity, kept + step) for step in steps) / len(steps)


def chunks(lengths: Sequence[int], largest: int) -> list[Chunk]:
    """Return chunks of every size that end at these positions."""
    sizes = sorted({max(1, largest // part) for part in CHUNK_PARTS})
    return [Chunk(size, end) for end in lengths for size in sizes if size <= end]


def decodes(lengths: Sequence[int], batches: Sequence[int]) -> list[Decode]:
    """Return batches of every size at these prompt lengths; shares take turns."""
    return [
        Decode(batch, prompt, SHARES[(row + column) % len(SHARES)])
        for row, prompt in enumerate(lengths)
        for column, batch in enumerate(batches)
    ]


def chunk_fits(chunk: Chunk, spec: PolicySpec, shape: KVShape, kv_bytes: int) -> bool:
    """Return True if the engine could hold the prompt meanwhile."""
    return workspace_bytes(spec, shape, chunk.end + 1) <= kv_bytes


def decode_fits(cell: Decode, spec: PolicySpec, shape: KVShape, kv_bytes: int, new_tokens: int) -> bool:
    """Return True if the engine could hold the slots."""
    return cell.batch * slot_bytes(cell.spec(spec), shape, cell.prompt, new_tokens) <= kv_bytes

"""AdaKV (Feng et al., 2024, arXiv 2407.11550): the heads of a layer share one budget."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from warmkv.policies.compression.base import NONE
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.scoring import best
from warmkv.policies.compression.snapkv import SnapKV


class AdaKV(SnapKV):
    """SnapKV's votes, compared across the KV heads of a layer: heads whose attention is spread keep more.

    What a head keeps is interpolated between its part of the layer's best votes and an even share (section 3.3).
    """

    def choose(self, scores: Tensor, ends: tuple[int, int], budget: int, prompt: PrefillState) -> Tensor:
        assert self.spec.floor is not None
        first, last = ends
        heads, tokens = scores.shape
        even = budget - first - last
        between = scores[:, first : tokens - last]
        winners = best(between.flatten(), heads * even) // between.shape[1]  # the head of each
        counts = safeguarded(winners.bincount(minlength=heads).tolist(), even, self.spec.floor)
        kept = torch.ones(heads, tokens, dtype=torch.bool, device=scores.device)
        kept[:, first : tokens - last] = False
        for head, count in enumerate(counts):
            kept[head, first + best(between[head], count)] = True
        return padded_positions(kept)


def safeguarded(greedy: Sequence[int], even: int, floor: float) -> list[int]:
    """Return `(1 - floor) * greedy + floor * even` per head, rounded so that the sum stays `len(greedy) * even`.

    The largest remainders are rounded up, the first of equals. The authors round each head for itself, by which a layer
    may keep a few tokens more or fewer than its budget.
    """
    part = Fraction(str(floor))
    exact = [(1 - part) * count + part * even for count in greedy]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda head: counts[head] - exact[head])
    for head in by_remainder[: len(greedy) * even - sum(counts)]:
        counts[head] += 1
    return counts


def padded_positions(kept: Tensor) -> Tensor:
    """Positions of a mask [kv_heads, T], ascending, as [kv_heads, n] with NONE at the ends of shorter rows."""
    counts = kept.sum(dim=1)
    longest = int(counts.max())
    order = kept.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :longest]
    return order.masked_fill(torch.arange(longest, device=kept.device) >= counts[:, None], NONE)

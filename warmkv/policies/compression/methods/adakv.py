"""AdaKV (Feng et al., 2024, arXiv 2407.11550): the heads of a layer share one budget."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from warmkv.knobs import KERNEL, POOLING, WINDOW, Knob
from warmkv.policies.compression.method import register
from warmkv.policies.compression.methods.snapkv import SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class AdaKV(SnapKV):
    """SnapKV's votes, compared across the KV heads of a layer: heads whose attention is spread keep more.

    What a head keeps is interpolated between its part of the layer's best votes and an even share (section 3.3).
    """

    name = "adakv"
    knobs = (
        WINDOW,
        KERNEL.by_default(7),
        POOLING.by_default("max"),
        Knob("floor", float, 0.2, "weight of an even share beside what heads win, 1 is snapkv", ge=0, le=1),
    )
    keeps = "as snapkv"
    differs = "budgets by head"
    source = "2407.11550; FFY0/AdaKV"
    deviates = "head budgets are rounded together, so that the layer keeps exactly its budget"
    follows_content = shares_heads = True
    by_default_in_eval = False

    def choose(self, scores: Tensor, ends: tuple[int, int], budget: int, prompt: PrefillState) -> Tensor:
        import torch

        from warmkv.policies.compression.scoring import best, padded_positions

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

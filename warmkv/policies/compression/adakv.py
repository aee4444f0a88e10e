"""AdaKV (Feng et al., 2024, arXiv 2407.11550): the heads of a layer share one budget."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.base import NONE
from warmkv.policies.compression.prompt import Prompt
from warmkv.policies.compression.scoring import best
from warmkv.policies.compression.snapkv import SnapKV


class AdaKV(SnapKV):
    """SnapKV's votes, compared across the KV heads of a layer: heads whose attention is spread keep more.

    Every head keeps its own best `floor` share whatever the others offer (section 3.3).
    """

    def choose(self, scores: Tensor, ends: tuple[int, int], budget: int, prompt: Prompt) -> Tensor:
        assert self.spec.floor is not None
        first, last = ends
        heads, tokens = scores.shape
        own = budget - first - last
        between = scores[:, first : tokens - last]
        safe = best(between, int(self.spec.floor * own))
        rank = between.scatter(1, safe, float("inf"))
        taken = torch.zeros_like(between, dtype=torch.bool)
        taken.view(-1)[best(rank.flatten(), heads * own)] = True
        kept = torch.ones(heads, tokens, dtype=torch.bool, device=scores.device)
        kept[:, first : tokens - last] = taken
        return padded_positions(kept)


def padded_positions(kept: Tensor) -> Tensor:
    """Positions of a mask [kv_heads, T], ascending, as [kv_heads, n] with NONE at the ends of shorter rows."""
    counts = kept.sum(dim=1)
    longest = int(counts.max())
    order = kept.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :longest]
    return order.masked_fill(torch.arange(longest, device=kept.device) >= counts[:, None], NONE)

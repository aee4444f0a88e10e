"""FastGen (Ge et al., 2023, arXiv 2310.01801): each head keeps what its own attention needs."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.budgets import share
from warmkv.policies.compression.adakv import padded_positions
from warmkv.policies.compression.base import Policy
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.scoring import best

HEAVY = RECENT = 0.3


class FastGen(Policy):
    """Per KV head, the first of [special, +punctuation, +heavy, +window, everything] that recovers enough attention.

    Recovery is measured on the prompt itself, as the mean share of their attention that all queries find in the set
    (section 4). The last token is always kept.
    """

    def layer_budgets(self, prompt: PrefillState) -> list[int]:
        return [prompt.tokens] * prompt.layers

    def select_layer(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        assert prompt.column_sums is not None
        assert self.spec.recovery is not None
        sums = prompt.column_sums[layer]
        heads, tokens = sums.shape
        kept = prompt.members("special").expand(heads, -1).clone()
        done = self._recovers(sums, kept)
        part = share(HEAVY, tokens)
        heavy = torch.zeros_like(kept).scatter(1, best(sums, part), True)
        recent = torch.arange(tokens, device=sums.device) >= tokens - share(RECENT, tokens)
        for more in (prompt.members("punctuation"), heavy, recent, torch.ones_like(kept)):
            kept = torch.where(done[:, None], kept, kept | more)
            done |= self._recovers(sums, kept)
        kept[:, -1] = True
        return padded_positions(kept)

    def _recovers(self, sums: Tensor, kept: Tensor) -> Tensor:
        assert self.spec.recovery is not None
        return (sums * kept).sum(dim=1) >= self.spec.recovery * sums.sum(dim=1)

"""H2O (Zhang et al., 2023, arXiv 2306.14048): heavy hitters and the most recent tokens."""

from __future__ import annotations

from torch import Tensor

from warmkv.policies.budgets import recent_entries
from warmkv.policies.compression.base import Policy
from warmkv.policies.compression.prefill_state import PrefillState


class H2O(Policy):
    """Keep the most recent tokens and, per KV head, those before them that received most attention from all queries.

    While decoding, attention is added up and a new token takes the place of the least attended one that is not recent
    (Algorithm 1). `heavy` is the share of the budget that is not the most recent.
    """

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, recent_entries(self.spec, budget)

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        assert prompt.column_sums is not None
        return prompt.column_sums[layer]

"""H2O (Zhang et al., 2023, arXiv 2306.14048): heavy hitters and the most recent tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import HEAVY
from warmkv.policies.budgets import recent_entries
from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class H2O(Method):
    """Keep the most recent tokens and, per KV head, those before them that received most attention from all queries.

    While decoding, attention is added up and a new token takes the place of the least attended one that is not recent
    (Algorithm 1). `heavy` is the share of the budget that is not the most recent.
    """

    name = "h2o"
    knobs = (HEAVY,)
    keeps = "most attended by all queries, and recent"
    source = "2306.14048; FMInference/H2O, `utils_real_drop`"
    deviates = "the token that is being decoded counts towards the budget"
    decode = "argmin"
    by_default_in_eval = True

    def needs_column_sums(self, compressed: bool) -> bool:
        return compressed or self.spec.decode == "argmin"

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, recent_entries(self.spec, budget)

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        assert prompt.column_sums is not None
        return prompt.column_sums[layer]

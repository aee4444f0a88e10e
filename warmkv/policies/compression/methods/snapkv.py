"""SnapKV (Li et al., 2024, arXiv 2404.14469): the prompt's last queries vote for what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import VOTES
from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class SnapKV(Method):
    """Keep the observation window and, per KV head, the tokens before it that its queries attend to most.

    Votes are summed over the window and over the query heads of a KV head, then pooled along positions so that
    neighbours of a vote survive with it (section 3.2). A budget within the window keeps the last tokens only.
    """

    name = "snapkv"
    knobs = VOTES
    keeps = "voted for by the last `w`, and these"
    source = "2404.14469; FasterDecoding/SnapKV"
    deviates = "kernel 5, avg as in the code; the LongBench runs take 7, max"
    by_default_in_eval = True

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, self.votes_window(budget)

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        import torch.nn.functional as F

        from warmkv.policies.compression.scoring import pool_positions, window_votes

        window = self.votes_window(budget)
        votes = window_votes(prompt, layer, window)
        return F.pad(pool_positions(votes, self.spec.kernel, self.spec.pooling), (0, window))

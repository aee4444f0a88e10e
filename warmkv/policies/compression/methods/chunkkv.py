"""ChunkKV (Liu et al., 2025, arXiv 2502.00299): neighbours are kept together, so that meaning stays whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import WINDOW, Knob
from warmkv.policies.compression.method import register
from warmkv.policies.compression.methods.snapkv import SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState


@register
class ChunkKV(SnapKV):
    """Keep the observation window and the chunks of `chunk` tokens before it that its queries attend to most.

    A chunk's score is the mean attention on its tokens, summed over the window and over all heads: every KV head of a
    layer keeps the same chunks (section 3.2). Of a chunk that does not fit the budget whole, the first tokens stay.
    """

    name = "chunkkv"
    knobs = (WINDOW, Knob("chunk", int, 10, "tokens that are kept or evicted together", ge=1, le=4096))
    keeps = "chunks voted for by the last `w`, and these"
    differs = "nothing"
    source = "2502.00299; NVIDIA/kvpress"
    deviates = "chunks end before the window; layers do not reuse each other's choice"
    by_default_in_eval = False

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        import torch.nn.functional as F

        from warmkv.policies.compression.scoring import window_votes

        window, size = self.votes_window(budget), self.spec.chunk
        votes = window_votes(prompt, layer, window).sum(dim=0, keepdim=True)
        chunks = F.avg_pool1d(votes, size, stride=size, ceil_mode=True)  # the last one may be shorter
        scores = chunks.repeat_interleave(size, dim=1)[:, : votes.shape[1]]
        return F.pad(scores, (0, window)).expand(prompt.kv_heads, -1)

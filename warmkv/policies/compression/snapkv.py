"""SnapKV (Li et al., 2024, arXiv 2404.14469): the prompt's last queries vote for what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.base import Policy
from warmkv.policies.compression.scoring import pool_positions, window_attention


class SnapKV(Policy):
    """Keep the observation window and, per KV head, the tokens before it that its queries attend to most.

    Votes are summed over the window and over the query heads of a KV head, then pooled along positions so that
    neighbours of a vote survive with it (section 3.2). A budget within the window keeps the last tokens only.
    """

    def select(self, keys: Tensor, queries: Tensor | None, scale: float) -> Tensor:
        heads, tokens, _ = keys.shape
        kept = self.kept(tokens)
        window = min(self.spec.window, kept)
        last = torch.arange(tokens - window, tokens, device=keys.device).expand(heads, window)
        if kept == window:
            return last
        assert queries is not None
        votes = window_attention(keys, queries, scale).sum(dim=(1, 2))[:, : tokens - window]
        votes = pool_positions(votes, self.spec.kernel, self.spec.pooling)
        chosen = votes.topk(kept - window, dim=-1).indices.sort(dim=-1).values
        return torch.cat([chosen, last], dim=-1)

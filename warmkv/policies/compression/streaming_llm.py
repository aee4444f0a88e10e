"""StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): attention sinks and a rolling window."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies import budgets
from warmkv.policies.compression.base import Policy


class StreamingLLM(Policy):
    """Keep the first `sinks` tokens and the most recent ones; while decoding, a ring over the recent ones.

    Positions are those within the cache (section 3.2). Only distances matter to rotary attention, so recents keep the
    rotation they were cached with and the sinks are rotated on by what has been dropped between the two.
    """

    @property
    def sinks(self) -> int:
        return budgets.ring_sinks(self.spec)

    @property
    def ring(self) -> bool:
        return True

    def select(self, keys: Tensor, queries: Tensor | None, scale: float) -> Tensor:
        heads, tokens, _ = keys.shape
        kept = self.kept(tokens)
        first = torch.arange(self.sinks, device=keys.device)
        recent = torch.arange(tokens - (kept - self.sinks), tokens, device=keys.device)
        return torch.cat([first, recent]).expand(heads, kept)

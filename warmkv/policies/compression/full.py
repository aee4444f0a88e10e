"""The full cache: the baseline that every method is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.base import Policy


class Full(Policy):
    """Keep everything; the answers are those of plain transformers."""

    def select(self, keys: Tensor, queries: Tensor | None, scale: float) -> Tensor:
        heads, tokens, _ = keys.shape
        return torch.arange(tokens, device=keys.device).expand(heads, tokens)

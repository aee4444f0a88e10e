"""Contexts that nobody computed: the same random keys and values for every contestant."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.engine.setting import Models, Setting

SHIFT = 16
"""Tokens by which the context of a sequence begins later than that of the one before it."""
FIRST = 0
"""The token that every sequence decodes first."""


class Contexts:
    """Keys and values of all sequences, as windows of one tensor, and token ids for who wants them."""

    def __init__(self, models: Models, setting: Setting) -> None:
        shape, self.tokens = models.warm.kv_shape, setting.context
        generator = torch.Generator(models.device).manual_seed(setting.seed)
        size = (2, shape.layers, shape.kv_heads, self.tokens + SHIFT * (setting.sequences - 1), shape.head_dim)
        self._all = torch.randn(size, generator=generator, dtype=models.warm.dtype, device=models.device)
        ids = torch.Generator().manual_seed(setting.seed)
        self.ids = torch.randint(models.warm.vocabulary, (setting.sequences, self.tokens + 1), generator=ids)
        self.ids[:, -1] = FIRST

    def of(self, sequence: int) -> Tensor:
        """Return keys and values [2, layers, kv_heads, tokens, head_dim] of one sequence."""
        return self._all[:, :, :, SHIFT * sequence : SHIFT * sequence + self.tokens]

    def layer(self, layer: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and the values [sequences, kv_heads, tokens, head_dim] of a layer."""
        keys, values = (torch.stack([self.of(number)[part, layer] for number in range(sequences)]) for part in range(2))
        return keys, values

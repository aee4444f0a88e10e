"""Entries as the model computes them: the storage that loses nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.storage.base import Codec


class Plain(Codec):
    """Keep keys and values in their own type."""

    name = "model"

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        return (keys,)

    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

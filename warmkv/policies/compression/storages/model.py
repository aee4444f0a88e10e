"""Entries as the model computes them: the storage that loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.policies.compression.storage_format import StorageFormat, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ModelDtype(StorageFormat):
    """Keep keys and values in their own type."""

    name = "model"
    plain = for_blocks = True
    kernel = "warmkv.replicas.slots.kernels.model"
    formula = "2 * d * bytes of the dtype"

    def entry_bytes(self, head_dim: int, dtype_bytes: int) -> float:
        return 2.0 * head_dim * dtype_bytes

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        return (keys,)

    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


register(ModelDtype())

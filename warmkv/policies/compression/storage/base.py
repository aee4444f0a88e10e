"""What a storage codec is: keys and values to the tensors that are kept of them, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Keeps the entries of a slot as a tuple of tensors, its parts. Stateless and the same on every device.

    Every part has the shape [*lead, n / group, ...], so a slab is allocated by encoding zeros, and its groups are
    replaced by indexing the dimension behind `lead`. Parts are uint8 and float16 (those of `model` aside), which every
    device can gather, scatter and copy. Encoding computes in float32.
    """

    name: str
    group: int = 1  # entries that are encoded together along the token axis; 1 if each stands alone

    @abstractmethod
    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        """The parts of keys [*lead, n, head_dim] of a floating type. Raises ValueError if `group` does not divide n."""

    @abstractmethod
    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Keys [*lead, n, head_dim] in the basis of `to_basis`."""

    # Only KIVI treats the two differently.
    def encode_values(self, values: Tensor) -> tuple[Tensor, ...]:
        """The parts of values; as `encode_keys`."""
        return self.encode_keys(values)

    def decode_values(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Values [*lead, n, head_dim] in the basis that `from_basis` leaves."""
        return self.decode_keys(parts, dtype)

    def to_basis(self, x: Tensor) -> Tensor:
        """Queries [..., head_dim] in the basis of decoded keys; same shape and type."""
        return x

    def from_basis(self, x: Tensor) -> Tensor:
        """Attention outputs [..., head_dim] out of the basis of decoded values; same shape and type."""
        return x

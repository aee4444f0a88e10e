"""Prefix blocks in the storage formats that take them (`StorageFormat.for_blocks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from warmkv.config import BlockStorage
from warmkv.policy_spec import STORAGES


@dataclass(frozen=True, slots=True)
class Packed:
    """A block of `tokens` tokens, or something that is no KV (0 tokens) and is kept as it is."""

    storage: BlockStorage
    tokens: int
    parts: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(self.storage, self.tokens, tuple(change(part) for part in self.parts))


def pack(block: Tensor, tokens: int, storage: BlockStorage) -> Packed:
    """Encode a block [2, layers, kv_heads, tokens, head_dim]: keys, then values.

    Tokens beyond the last whole group of a format that has groups stay as they are.
    """
    if not tokens or STORAGES[storage].plain:
        return Packed("model", tokens, (block,))
    kept = STORAGES[storage]
    whole = tokens // kept.group * kept.group
    keys, values = block[..., :whole, :]
    rest = block[..., whole:, :].contiguous()
    return Packed(storage, tokens, (*kept.encode_keys(keys), *kept.encode_values(values), rest))


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Unpack a block to [2, layers, kv_heads, tokens, head_dim] in `dtype`, or what is no KV as it is."""
    kept = STORAGES[packed.storage]
    if kept.plain:
        return packed.parts[0]
    *parts, rest = packed.parts
    half = len(parts) // 2
    keys = kept.from_basis(kept.decode_keys(tuple(parts[:half]), dtype))
    values = kept.from_basis(kept.decode_values(tuple(parts[half:]), dtype))
    return torch.cat([torch.stack([keys, values]), rest], dim=-2)


def repack(packed: Packed, storage: BlockStorage, dtype: torch.dtype) -> Packed:
    """Convert a block to another format."""
    if packed.storage == storage or not packed.tokens:
        return packed
    return pack(unpack(packed, dtype), packed.tokens, storage)

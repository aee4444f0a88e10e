"""Codes of a few bits in bytes, with no bit unused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack uint8 codes below 2^bits along dimension `dim`, whose size n becomes n * bits / 8.

    1, 2 and 4 bits need an n that is a multiple of 8 / bits, 3 bits one of 8. A byte takes one code from each equal
    stretch of the dimension rather than neighbours, so that unpacking copies whole stretches.
    """
    import torch

    if bits == 3:  # the lower two bits of all codes, then the highest: no code lies across two bytes
        return torch.cat([pack(codes & 3, 2, dim), pack(codes >> 2, 1, dim)], dim)
    first, *others = codes.chunk(8 // bits, dim)
    for i, stretch in enumerate(others, start=1):
        first = first | stretch << i * bits
    return first


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the codes that `pack` packed along `dim`, as uint8."""
    import torch

    if bits == 3:
        lower, second, highest = packed.chunk(3, dim)
        return unpack(torch.cat([lower, second], dim), 2, dim) | unpack(highest, 1, dim) << 2
    mask = (1 << bits) - 1
    return torch.cat([packed >> shift & mask for shift in range(0, 8, bits)], dim)

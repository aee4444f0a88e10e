"""KIVI (Liu et al., 2024, arXiv 2402.02750): asymmetric integers, keys by channel and values by token."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Literal

from warmkv.policies.compression.integers import LARGEST, dequantise, quantise
from warmkv.policies.compression.packing import pack, unpack
from warmkv.policies.compression.storage_format import SCALE_BYTES, StorageFormat, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = 32  # numbers that share a zero point and a step


class Kivi(StorageFormat):
    """Round to 2^bits steps between the least and the greatest number of a group of 32 (section 3).

    Keys are grouped per channel over 32 tokens, because some channels of keys are large in all tokens; values per token
    over 32 channels, or gcd(32, head_dim) where 32 does not divide head_dim. The paper's residual of recent tokens in
    full precision is the caller's: entries are encoded once their group is complete.

    Codes [*lead, n/32, 32*bits/8, head_dim] are packed along the tokens of a group; zero points and steps are float16,
    [*lead, n/32, head_dim] of keys and [*lead, n/32, 32, head_dim/32] of values. Encoding what was decoded gives the
    same codes, provided that the type decoded to resolves a step. Beyond ±65000 numbers are clamped.
    """

    alias = "kivi"
    group = GROUP
    # 128 as its authors evaluate it on LongBench; 32, as in their example, where it is a part of a policy: in the rows
    # that eviction leaves, 128 entries in the model's dtype would be most of what is kept.
    residual, alias_residual = 32, 128
    kernel = "warmkv.replicas.slots.kernels.kivi"
    source = "2402.02750; jy-yuan/KIVI"
    deviates = "keys and values wait in one tail, packed 32 at a time; a residual of 32 where it is a part of a policy"

    def __init__(self, bits: Literal[4, 2]) -> None:
        self.name, self.bits, self.for_blocks = f"kivi{bits}", bits, bits == 4
        self.formula = f"{'d' if bits == 4 else 'd / 2'} + 4 * d / 32 + 4 * d / gcd(32, d)"

    def entry_bytes(self, head_dim: int, dtype_bytes: int) -> float:
        codes = 2 * head_dim * self.bits / 8
        key_scales = 2 * SCALE_BYTES * head_dim / GROUP  # a zero point and a step per channel of a group of tokens
        value_scales = 2 * SCALE_BYTES * head_dim // gcd(GROUP, head_dim)  # and per group of channels of a token
        return codes + key_scales + value_scales

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        codes, zero, step = quantise(_grouped(keys), dim=-2, bits=self.bits)
        return pack(codes, self.bits, dim=-2), zero.squeeze(-2), step.squeeze(-2)

    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        packed, zero, step = parts
        codes = unpack(packed, self.bits, dim=-2)
        return dequantise(codes, zero.unsqueeze(-2), step.unsqueeze(-2)).flatten(-3, -2).to(dtype)

    def encode_values(self, values: Tensor) -> tuple[Tensor, ...]:
        import torch

        channels = gcd(GROUP, values.shape[-1])
        by_token = torch.unflatten(_grouped(values), -1, (values.shape[-1] // channels, channels))
        codes, zero, step = quantise(by_token, dim=-1, bits=self.bits)
        return pack(codes.flatten(-2), self.bits, dim=-2), zero.squeeze(-1), step.squeeze(-1)

    def decode_values(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        import torch

        packed, zero, step = parts
        groups = zero.shape[-1]
        codes = torch.unflatten(unpack(packed, self.bits, dim=-2), -1, (groups, packed.shape[-1] // groups))
        return dequantise(codes, zero.unsqueeze(-1), step.unsqueeze(-1)).flatten(-2).flatten(-3, -2).to(dtype)


def _grouped(x: Tensor) -> Tensor:
    """Reshape [*lead, n, head_dim] to float32 [*lead, n/32, 32, head_dim]."""
    import torch

    entries = x.shape[-2]
    if entries % GROUP:
        raise ValueError(f"KIVI encodes groups of {GROUP} entries, not {entries}: keep the last ones as they are")
    clamped = x.float().clamp(-LARGEST, LARGEST)
    return torch.unflatten(clamped, -2, (entries // GROUP, GROUP))


register(Kivi(4))
register(Kivi(2))

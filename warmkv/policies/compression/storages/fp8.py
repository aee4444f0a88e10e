"""Eight-bit floating point: E4M3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022, arXiv 2209.05433)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.policies.compression.storage_format import StorageFormat, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LARGEST = 448.0


class Fp8(StorageFormat):
    """Keep every number as float8_e4m3fn, without scales: 3 bits of mantissa, down to 2^-9.

    What is beyond ±448 becomes ±448: the format has no infinity, and not every release of torch saturates in a cast.
    """

    name = alias = "fp8"
    for_blocks = True
    kernel = "warmkv.replicas.slots.kernels.fp8"
    formula = "2 * d"
    source = "2209.05433"
    deviates = "no scales"

    def entry_bytes(self, head_dim: int, dtype_bytes: int) -> float:
        return 2.0 * head_dim

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        import torch

        kept = keys.float().clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        return (kept.view(torch.uint8),)  # few operations know float8; all know bytes

    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        import torch

        return parts[0].view(torch.float8_e4m3fn).to(dtype)


register(Fp8())

"""Eight-bit floating point: E4M3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022, arXiv 2209.05433)."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.storage.base import Codec

_LARGEST = 448.0


class Fp8(Codec):
    """Keep every number as float8_e4m3fn, without scales: 3 bits of mantissa, down to 2^-9.

    What is beyond ±448 becomes ±448: the format has no infinity, and not every release of torch saturates in a cast.
    """

    name = "fp8"

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        kept = keys.float().clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        return (kept.view(torch.uint8),)  # few operations know float8; all know bytes

    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].view(torch.float8_e4m3fn).to(dtype)

"""TurboQuant (Zandieh et al., 2025, arXiv 2504.19874): a random rotation, then one codebook for every coordinate."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Literal

from warmkv.policies.compression.packing import pack, unpack
from warmkv.policies.compression.rotation import RotatedFormat, kept
from warmkv.policies.compression.storage_format import SCALE_BYTES, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Positive levels of the Lloyd-Max quantiser of N(0, 1), which is symmetric: the codebook of section 3.1 times sqrt(d).
# The test computes them again.
POSITIVE_LEVELS = {
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
_LARGEST_HALF = 65_504.0


class TurboQuant(RotatedFormat):
    """Rotate a vector, round its coordinates to the codebook, keep a scale (algorithm 1, the variant of least MSE).

    The rotation makes the coordinates of any vector look like samples of N(0, norm^2 / head_dim), so no calibration and
    no groups are needed.

    Parts: codes [*lead, n, head_dim*bits/8] and a float16 scale [*lead, n, 1]. Instead of the norm, the scale is what
    gives the decoded vector the norm of the original: rounding to centroids makes vectors shorter and so all logits
    smaller, by a share that is the MSE. The correction halves that and adds less than a hundredth to the MSE. A scale
    is of the size of a coordinate, so it fits float16 where the norm may not. It is clamped so that no decoded number
    exceeds float16: vectors whose root mean square is beyond about 24000 (4 bits) or 30000 (3 bits) come out shorter.
    """

    alias = "turboquant"
    kernel = "warmkv.replicas.slots.kernels.turboquant"
    source = "2504.19874, algorithm 1; vllm-project/vllm (not by its authors)"
    deviates = (
        "Hadamard rotation; levels of the normal limit; the norm is restored; no outlier channels, no 1-bit residual"
    )

    def __init__(self, bits: Literal[4, 3], seed: int = 0) -> None:
        self.name, self.bits = f"turbo{bits}", bits
        self.head_dim_multiple = 8 if bits == 3 else 2
        self.formula = f"2 * ({'d / 2' if bits == 4 else '3 * d / 8'} + 2)"
        self.seed = seed

    def entry_bytes(self, head_dim: int, dtype_bytes: int) -> float:
        return 2 * (head_dim * self.bits / 8 + SCALE_BYTES)

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Encode keys as `StorageFormat.encode_keys`.

        Raises ValueError if the codes of a vector do not fill whole bytes.
        """
        import torch

        head_dim, multiple = keys.shape[-1], self.head_dim_multiple
        if head_dim % multiple:
            # Padding would need a place for head_dim: decoding could not tell how much to cut off again.
            raise ValueError(f"{self.name} needs a head_dim that is a multiple of {multiple}, not {head_dim}")
        levels = self.levels(keys.device)
        rotated = keys.float() @ self.rotation(head_dim, keys.device)
        norm = rotated.norm(dim=-1, keepdim=True)
        deviation = torch.where(norm == 0, 1.0, norm / sqrt(head_dim))
        codes = torch.bucketize(rotated / deviation, (levels[1:] + levels[:-1]) / 2, out_int32=True)
        scale = norm / levels[codes].norm(dim=-1, keepdim=True)
        scale = scale.clamp(max=largest_scale(self.bits)).half()
        return pack(codes.to(torch.uint8), self.bits, dim=-1), scale

    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        packed, scale = parts
        codes = unpack(packed, self.bits, dim=-1).int()  # indexing with uint8 would mean a mask
        return (self.levels(packed.device)[codes] * scale.float()).to(dtype)

    def levels(self, device: torch.device) -> Tensor:
        """Return what codes stand for, times the scale: float32 [2^bits], ascending."""
        return _levels(self.bits, device)


def largest_scale(bits: int) -> float:
    """Return the largest scale of which no decoded number exceeds float16."""
    return _LARGEST_HALF / POSITIVE_LEVELS[bits][-1]


@kept
def _levels(bits: int, device: torch.device) -> Tensor:
    """Return all levels, ascending: [2^bits]."""
    import torch

    positive = torch.tensor(POSITIVE_LEVELS[bits], device=device)
    return torch.cat([-positive.flip(0), positive])


register(TurboQuant(4))
register(TurboQuant(3))

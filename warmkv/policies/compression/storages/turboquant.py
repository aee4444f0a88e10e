"""TurboQuant (Zandieh et al., 2025, arXiv 2504.19874): a random rotation, then one codebook for every coordinate."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING, Literal

from warmkv.policies.compression.packing import pack, unpack
from warmkv.policies.compression.storage_format import SCALE_BYTES, StorageFormat, register

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


class TurboQuant(StorageFormat):
    """Rotate a vector, round its coordinates to the codebook, keep a scale (algorithm 1, the variant of least MSE).

    The rotation makes the coordinates of any vector look like samples of N(0, norm^2 / head_dim), so no calibration and
    no groups are needed. It is a Hadamard matrix after random signs, or a random orthogonal matrix where head_dim is no
    power of two. Decoding stays in the rotated basis, where inner products are the same: rotating the queries and the
    output of attention costs far less than rotating the cache.

    Parts: codes [*lead, n, head_dim*bits/8] and a float16 scale [*lead, n, 1]. Instead of the norm, the scale is what
    gives the decoded vector the norm of the original: rounding to centroids makes vectors shorter and so all logits
    smaller, by a share that is the MSE. The correction halves that and adds less than a hundredth to the MSE. A scale
    is of the size of a coordinate, so it fits float16 where the norm may not. It is clamped so that no decoded number
    exceeds float16: vectors whose root mean square is beyond about 24000 (4 bits) or 30000 (3 bits) come out shorter.
    """

    alias = "turboquant"
    rotated = True
    kernel = "warmkv.replicas.slots.kernels.turboquant"
    source = "2504.19874, algorithm 1; vllm-project/vllm (not by its authors)"
    deviates = (
        "Hadamard rotation; levels of the normal limit; the norm is restored; no outlier channels, no 1-bit residual"
    )

    def __init__(self, bits: Literal[4, 3], seed: int = 0) -> None:
        self.name, self.bits = f"turbo{bits}", bits
        self.head_dim_multiple = 8 if bits == 3 else 2
        self.formula = f"2 * ({'d / 2' if bits == 4 else '3 * d / 8'} + 2)"
        self._seed = seed

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
        rotated = keys.float() @ self._rotation(keys)
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

    def to_basis(self, x: Tensor) -> Tensor:
        return (x.float() @ self._rotation(x)).to(x.dtype)

    def from_basis(self, x: Tensor) -> Tensor:
        return (x.float() @ self._rotation(x).T).to(x.dtype)

    def rotation(self, head_dim: int, device: torch.device) -> Tensor:
        """Return the matrix [head_dim, head_dim], float32, whose product with a row vector rotates it."""
        return _rotation(head_dim, self._seed, device)

    def _rotation(self, x: Tensor) -> Tensor:
        return self.rotation(x.shape[-1], x.device)


def largest_scale(bits: int) -> float:
    """Return the largest scale of which no decoded number exceeds float16."""
    return _LARGEST_HALF / POSITIVE_LEVELS[bits][-1]


def _kept(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Build a constant once for each device. A compiler cannot look into the cache: it gets the recipe instead."""

    @lru_cache(maxsize=64)
    def once(*args: Hashable) -> Tensor:
        import torch

        with torch.inference_mode(False):  # or autograd would refuse the constant for the rest of the process
            return build(*args)

    def constant(*args: Hashable) -> Tensor:
        import torch

        return build(*args) if torch.compiler.is_compiling() else once(*args)

    return constant


@_kept
def _levels(bits: int, device: torch.device) -> Tensor:
    """Return all levels, ascending: [2^bits]."""
    import torch

    positive = torch.tensor(POSITIVE_LEVELS[bits], device=device)
    return torch.cat([-positive.flip(0), positive])


@_kept
def _rotation(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix R [head_dim, head_dim], float32; x @ R rotates the row vectors x."""
    import torch

    if head_dim & (head_dim - 1):
        normal = torch.erfinv(_uniform(head_dim * head_dim, seed, device)).view(head_dim, head_dim)
        orthogonal, upper = torch.linalg.qr(normal)
        rotation: Tensor = orthogonal * upper.diagonal().sign()  # or the signs would be up to the device's library
        return rotation.contiguous()
    hadamard = torch.ones(1, 1, device=device)
    while len(hadamard) < head_dim:  # Sylvester's construction
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = _uniform(head_dim, seed, device).sign()
    return signs[:, None] * hadamard / sqrt(head_dim)


def _uniform(count: int, seed: int, device: torch.device) -> Tensor:
    """Return numbers in (-1, 1), float32 [count].

    They are a hash of the position (a finaliser of 32-bit hash tables): replicas that share a cache need the same
    numbers on every device and in every release of torch, which its generators do not promise.
    """
    import torch

    x = torch.arange(1, count + 1, device=device) + (seed * 0x9E3779B9 & 0xFFFFFFFF) & 0xFFFFFFFF
    for _ in range(2):
        x = (x ^ x >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return ((x ^ x >> 16) >> 9).float().add(0.5) / 2**22 - 1  # 23 bits, so that float32 represents it and never ±1


register(TurboQuant(4))
register(TurboQuant(3))

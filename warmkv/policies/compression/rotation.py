"""Formats that keep vectors in a random basis, in which the coordinates of any vector look alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING

from warmkv.policies.compression.storage_format import StorageFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class RotatedFormat(StorageFormat):
    """Keep vectors in the basis of a random rotation, the same on every device and in every release of torch.

    It is a Hadamard matrix after random signs, or a random orthogonal matrix where head_dim is no power of two.
    Decoding stays in the rotated basis, where inner products are the same: rotating the queries and the output of
    attention costs far less than rotating the cache.
    """

    rotated = True
    seed = 0

    def to_basis(self, x: Tensor) -> Tensor:
        return (x.float() @ self.rotation(x.shape[-1], x.device)).to(x.dtype)

    def from_basis(self, x: Tensor) -> Tensor:
        return (x.float() @ self.rotation(x.shape[-1], x.device).T).to(x.dtype)

    def rotation(self, head_dim: int, device: torch.device) -> Tensor:
        """Return the matrix [head_dim, head_dim], float32, whose product with a row vector rotates it."""
        return _rotation(head_dim, self.seed, device)


def kept(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
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


@kept
def _rotation(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix R [head_dim, head_dim], float32; x @ R rotates the row vectors x."""
    import torch

    if head_dim & (head_dim - 1):
        normal = torch.erfinv(_uniform(head_dim * head_dim, seed, device)).view(head_dim, head_dim)
        orthogonal, upper = torch.linalg.qr(normal)
        turned: Tensor = orthogonal * upper.diagonal().sign()  # or the signs would be up to the device's library
        return turned.contiguous()
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

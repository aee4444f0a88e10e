"""Four-bit integers by token and head: asymmetric, after a random rotation, as vLLM's `int4_per_token_head`.

The rotation of keys and values is that of QuaRot (Ashkboos et al., 2024, arXiv 2404.00456, section 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.policies.compression.integers import LARGEST, dequantise, quantise
from warmkv.policies.compression.packing import pack, unpack
from warmkv.policies.compression.rotation import RotatedFormat
from warmkv.policies.compression.storage_format import SCALE_BYTES, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS = 4


class Int4(RotatedFormat):
    """Rotate a vector, round its coordinates to 16 steps between the least and the greatest of them.

    The rotation spreads channels that are large in all tokens over all coordinates, so that one range fits them and no
    groups are needed: each entry stands alone. Beyond ±65000 rotated coordinates are clamped.

    Parts: codes [*lead, n, head_dim / 2], and float16 zero points and steps [*lead, n, 2].
    """

    name = alias = "int4"
    head_dim_multiple = 2
    for_blocks = True
    kernel = "warmkv.replicas.slots.kernels.int4"
    formula = "2 * (d / 2 + 4)"
    source = "2404.00456, section 4; vllm-project/vllm, `int4_per_token_head`"
    deviates = "one group a vector, whole rotated heads; zero points are no integers, so no coordinate is cut off"

    def entry_bytes(self, head_dim: int, dtype_bytes: int) -> float:
        return 2 * (head_dim * _BITS / 8 + 2 * SCALE_BYTES)

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Encode keys as `StorageFormat.encode_keys`. Raises ValueError if the codes of a vector do not fill bytes."""
        import torch

        head_dim = keys.shape[-1]
        if head_dim % self.head_dim_multiple:
            raise ValueError(f"int4 needs a head_dim that is a multiple of {self.head_dim_multiple}, not {head_dim}")
        rotated = keys.float() @ self.rotation(head_dim, keys.device)
        codes, zero, step = quantise(rotated.clamp(-LARGEST, LARGEST), dim=-1, bits=_BITS)
        return pack(codes, _BITS, dim=-1), torch.cat([zero, step], -1)

    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        packed, scales = parts
        return dequantise(unpack(packed, _BITS, dim=-1), scales[..., :1], scales[..., 1:]).to(dtype)


register(Int4())

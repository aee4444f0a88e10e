"""TurboQuant inside a kernel: codes stand for levels of a table, times the entry's scale."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor, device

from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policies.compression.storages.turboquant import TurboQuant
from warmkv.replicas.slots.kernels.tiles import Reader


@triton.jit
def _load(
    part, scales, third, levels, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, D)
    inside = seen[:, None] & (channels < HEAD_DIM)[None, :]
    if BITS == 4:
        codes = _codes(part + entries[:, None] * (HEAD_DIM // 2), channels, inside, 4, HEAD_DIM)
    else:  # the lower two bits of all codes, then the highest
        row = part + entries[:, None] * (HEAD_DIM // 8 * 3)
        codes = _codes(row, channels, inside, 2, HEAD_DIM)
        codes |= _codes(row + HEAD_DIM // 4, channels, inside, 1, HEAD_DIM) << 2
    scale = tl.load(scales + entries, mask=seen, other=0.0).to(tl.float32)
    return tl.load(levels + codes) * scale[:, None]


@triton.jit
def _codes(row, channels, inside, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load codes that are packed along the channels, one from each of 8 / BITS equal stretches (see `packing.py`)."""
    STRETCH: tl.constexpr = HEAD_DIM * BITS // 8
    packed = tl.load(row + (channels % STRETCH)[None, :], mask=inside, other=0).to(tl.int32)
    return (packed >> (channels // STRETCH * BITS)[None, :]) & ((1 << BITS) - 1)


def _levels(storage: StorageFormat, where: device) -> Tensor:
    assert isinstance(storage, TurboQuant)
    return storage.levels(where)


READER = Reader(keys=_load, values=_load, table=_levels)

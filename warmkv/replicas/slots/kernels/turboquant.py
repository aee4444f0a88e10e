"""TurboQuant inside a kernel: codes stand for levels of a table, times the entry's scale."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor, device

from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policies.compression.storages.turboquant import TurboQuant, largest_scale
from warmkv.replicas.slots.kernels.codes import along_channels, in_stretches, packed
from warmkv.replicas.slots.kernels.tiles import Reader

LARGEST_SCALE_3, LARGEST_SCALE_4 = tl.constexpr(largest_scale(3)), tl.constexpr(largest_scale(4))


@triton.jit
def _load(
    part, scales, third, levels, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, D)
    inside = seen[:, None] & (channels < HEAD_DIM)[None, :]
    if BITS == 4:
        codes = along_channels(part + entries[:, None] * (HEAD_DIM // 2), channels, inside, 4, HEAD_DIM)
    else:  # the lower two bits of all codes, then the highest
        row = part + entries[:, None] * (HEAD_DIM // 8 * 3)
        codes = along_channels(row, channels, inside, 2, HEAD_DIM)
        codes |= along_channels(row + HEAD_DIM // 4, channels, inside, 1, HEAD_DIM) << 2
    scale = tl.load(scales + entries, mask=seen, other=0.0).to(tl.float32)
    return tl.load(levels + codes) * scale[:, None]


@triton.jit
def _put(
    codes, scales, entry, x, when, levels, rotation,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Encode an entry: rotated in as many equal stretches as codes are packed from (see `packing.py`)."""
    STRETCHES: tl.constexpr = 2 if BITS == 4 else 8
    STRETCH: tl.constexpr = HEAD_DIM // STRETCHES
    P: tl.constexpr = D // STRETCHES
    COUNT: tl.constexpr = 1 << BITS
    within = tl.arange(0, P)
    rotated, inside = in_stretches(x, rotation, STRETCHES, D, HEAD_DIM)
    norm = tl.sqrt_rn(tl.sum(tl.sum(rotated * rotated, 1), 0))
    scaled = rotated / tl.where(norm == 0.0, 1.0, norm / tl.sqrt_rn(tl.full([], HEAD_DIM, tl.float32)))
    code = tl.zeros([STRETCHES, P], tl.int32)
    for level in tl.static_range(COUNT - 1):
        middle = (tl.load(levels + level + 1) + tl.load(levels + level)) / 2
        code += (scaled > middle).to(tl.int32)
    chosen = tl.where(inside, tl.load(levels + code), 0.0)
    scale = norm / tl.sqrt_rn(tl.sum(tl.sum(chosen * chosen, 1), 0))
    LARGEST: tl.constexpr = LARGEST_SCALE_4 if BITS == 4 else LARGEST_SCALE_3
    tl.store(scales + entry, tl.minimum(scale, LARGEST).to(tl.float16), mask=when)
    row = codes + entry * (HEAD_DIM * BITS // 8)
    stored = (within < STRETCH) & when
    if BITS == 4:
        tl.store(row + within, packed(code, 4, 2, P).to(tl.uint8), mask=stored)
    else:  # the lower two bits of all codes, then the highest
        halves = tl.reshape(code & 3, (4, 2, P))
        shifted = halves << (tl.arange(0, 4) * 2)[:, None, None]
        lower = tl.sum(shifted, 0)
        places = tl.arange(0, 2)[:, None] * STRETCH + within[None, :]
        tl.store(row + places, lower.to(tl.uint8), mask=(tl.arange(0, 2) >= 0)[:, None] & stored[None, :])
        tl.store(row + HEAD_DIM // 4 + within, packed(code >> 2, 1, 8, P).to(tl.uint8), mask=stored)


def _levels(storage: StorageFormat, where: device) -> Tensor:
    assert isinstance(storage, TurboQuant)
    return storage.levels(where)


READER = Reader(keys=_load, values=_load, put=_put, table=_levels)

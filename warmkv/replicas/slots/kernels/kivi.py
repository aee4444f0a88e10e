"""KIVI inside a kernel: a tile of keys is a group, whose zero points and steps are loaded once."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.policies.compression.storages import kivi
from warmkv.replicas.slots.kernels.tiles import Reader, load_rows

GROUP = tl.constexpr(kivi.GROUP)


@triton.jit
def _load_keys(
    part, zeros, steps, table, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Load keys: a zero point and a step for each channel of the group."""
    channels = tl.arange(0, D)
    at = start // GROUP * HEAD_DIM + channels
    zero = tl.load(zeros + at, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)
    step = tl.load(steps + at, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)
    return zero[None, :] + step[None, :] * _codes(part, entries, seen, BITS, D, HEAD_DIM)


@triton.jit
def _load_values(
    part, zeros, steps, table, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Load values: a zero point and a step for each gcd(GROUP, HEAD_DIM) channels of an entry."""
    POWER: tl.constexpr = HEAD_DIM & -HEAD_DIM  # the largest power of two that divides it
    CHANNELS: tl.constexpr = POWER if POWER < GROUP else GROUP
    groups = tl.arange(0, D // CHANNELS)
    at = entries[:, None] * (HEAD_DIM // CHANNELS) + groups[None, :]
    inside = seen[:, None] & (groups < HEAD_DIM // CHANNELS)[None, :]
    zero = tl.load(zeros + at, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(steps + at, mask=inside, other=0.0).to(tl.float32)
    codes = _codes(part, entries, seen, BITS, D, HEAD_DIM)
    return _per_channel(zero, CHANNELS, D) + _per_channel(step, CHANNELS, D) * codes


@triton.jit
def _codes(part, entries, seen, BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load codes: a byte holds one from each of 8 / BITS equal stretches of its group (see `packing.py`)."""
    ROWS: tl.constexpr = GROUP * BITS // 8
    inside = entries % GROUP
    packed = load_rows(part, entries // GROUP * ROWS + inside % ROWS, seen, D, HEAD_DIM).to(tl.int32)
    return ((packed >> (inside // ROWS * BITS)[:, None]) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _per_channel(x, CHANNELS: tl.constexpr, D: tl.constexpr):
    """Repeat [BLOCK, D / CHANNELS] to [BLOCK, D]."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], D // CHANNELS, CHANNELS))
    return tl.reshape(wide, (x.shape[0], D))


READER = Reader(keys=_load_keys, values=_load_values, wide=True)

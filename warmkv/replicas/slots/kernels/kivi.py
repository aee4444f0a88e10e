"""KIVI inside a kernel: a tile of keys is a group, whose zero points and steps are loaded once."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.policies.compression.storages import kivi
from warmkv.replicas.slots.kernels.codes import OFFSET, number, stretches
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
    zero -= step * OFFSET
    return zero[None, :] + step[None, :] * _codes(part, start, entries, seen, BITS, D, HEAD_DIM)


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
    zero -= step * OFFSET
    codes = _codes(part, start, entries, seen, BITS, D, HEAD_DIM)
    return _per_channel(zero, CHANNELS, D) + _per_channel(step, CHANNELS, D) * codes


@triton.jit
def _codes(part, start, entries, seen, BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load the codes of a group as float32 [GROUP, D], each OFFSET too large.

    A byte holds one from each of 8 / BITS equal stretches of the group (see `packing.py`). Each is loaded once, in
    words of four channels.
    """
    STRETCHES: tl.constexpr = 8 // BITS
    ROWS: tl.constexpr = GROUP // STRETCHES
    if HEAD_DIM % 4 == 0:
        rows, words = tl.arange(0, ROWS), tl.arange(0, D // 4)
        at = start // STRETCHES * (HEAD_DIM // 4) + rows[:, None] * (HEAD_DIM // 4) + words[None, :]
        inside = (words < HEAD_DIM // 4)[None, :] & (rows >= 0)[:, None]
        word = tl.load(part.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
        even = tl.join(stretches(word, 0, BITS), stretches(word, 16, BITS))
        odd = tl.join(stretches(word, 8, BITS), stretches(word, 24, BITS))
        # The channels of a word come last: they stay beside each other, and are stored together on their way.
        codes = tl.reshape(tl.join(even, odd), (ROWS, D // 4, STRETCHES, 4))
        return tl.reshape(tl.permute(codes, (2, 0, 1, 3)), (GROUP, D))
    else:  # noqa: RET505 - Triton compiles what follows a return, too
        inside = entries % GROUP
        byte = load_rows(part, entries // GROUP * ROWS + inside % ROWS, seen, D, HEAD_DIM).to(tl.int32)
        return number(byte >> (inside // ROWS * BITS)[:, None], 0, BITS)


@triton.jit
def _per_channel(x, CHANNELS: tl.constexpr, D: tl.constexpr):
    """Repeat [BLOCK, D / CHANNELS] to [BLOCK, D]."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], D // CHANNELS, CHANNELS))
    return tl.reshape(wide, (x.shape[0], D))


READER = Reader(keys=_load_keys, values=_load_values)

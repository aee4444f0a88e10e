"""Four-bit integers inside a kernel: codes, and a zero point and a step of each entry."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.policies.compression import integers
from warmkv.replicas.slots.kernels.codes import along_channels, in_stretches, packed
from warmkv.replicas.slots.kernels.tiles import Reader

LARGEST, SMALLEST_STEP = tl.constexpr(integers.LARGEST), tl.constexpr(integers.SMALLEST_STEP)
TO_EVEN = tl.constexpr(1.5 * 2.0**23)
"""What rounds float32 of up to 2^22 to integers, as torch does, by adding and subtracting it."""


@triton.jit
def _load(
    part, scales, third, levels, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, D)
    inside = seen[:, None] & (channels < HEAD_DIM)[None, :]
    codes = along_channels(part + entries[:, None] * (HEAD_DIM // 2), channels, inside, 4, HEAD_DIM)
    zero = tl.load(scales + entries * 2, mask=seen, other=0.0).to(tl.float32)
    step = tl.load(scales + entries * 2 + 1, mask=seen, other=0.0).to(tl.float32)
    decoded = zero[:, None] + step[:, None] * codes.to(tl.float32)
    return decoded if D == HEAD_DIM else tl.where(inside, decoded, 0.0)


@triton.jit
def _put(
    codes, scales, entry, x, when, levels, rotation,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Encode an entry, rotated in the two halves that codes are packed from, as `integers.quantise` does."""
    HALF: tl.constexpr = HEAD_DIM // 2
    P: tl.constexpr = D // 2
    within = tl.arange(0, P)
    rotated, inside = in_stretches(x, rotation, 2, D, HEAD_DIM)
    rotated = tl.minimum(tl.maximum(rotated, -LARGEST), LARGEST)
    least = tl.min(tl.min(tl.where(inside, rotated, float("inf")), 1), 0)
    most = tl.max(tl.max(tl.where(inside, rotated, float("-inf")), 1), 0)
    spacing = _half_spacing(least)
    zero = tl.ceil(tl.div_rn(least, spacing)) * spacing
    step = tl.div_rn(most - zero, tl.full([], 15.0, tl.float32))
    spacing = _half_spacing(step)
    step = _rounded(tl.div_rn(step, spacing)) * spacing
    step = tl.where(step < SMALLEST_STEP, 0.0, step)
    number = _rounded(tl.div_rn(rotated - zero, tl.where(step == 0.0, 1.0, step) + tl.zeros_like(rotated)))
    code = tl.minimum(tl.maximum(number, 0.0), 15.0).to(tl.int32)
    tl.store(scales + entry * 2, zero.to(tl.float16), mask=when)
    tl.store(scales + entry * 2 + 1, step.to(tl.float16), mask=when)
    tl.store(codes + entry * HALF + within, packed(code, 4, 2, P).to(tl.uint8), mask=(within < HALF) & when)


@triton.jit
def _rounded(x):
    return (x + TO_EVEN) - TO_EVEN


@triton.jit
def _half_spacing(x):
    """Return the distance between neighbouring float16 numbers at float32 `x`, by its exponent."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(power, 0.00006103515625) * 0.0009765625


READER = Reader(keys=_load, values=_load, put=_put)

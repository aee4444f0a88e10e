"""Reading stored entries inside a kernel: what `decode_keys` and `decode_values` of the codecs do, tile by tile.

Each function returns a tile [BLOCK, D] of floating point numbers. D is the head dimension rounded up to a power of two;
what is beyond it, and entries that are not seen, are never loaded. Pointers are those of the row's parts.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# Triton compiles these functions from their source: annotations other than constexpr mean nothing to it.

import triton
import triton.language as tl

GROUP = tl.constexpr(32)  # entries of a KIVI group


@triton.jit
def load_keys(
    part, zeros, steps, levels, start, entries, seen,
    STORAGE: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Keys of `entries` [BLOCK], of which the first is `start` where nothing is left out."""
    if STORAGE == "kivi4" or STORAGE == "kivi2":
        # BLOCK is a group: its zero points and steps, one for each channel, are loaded once.
        channels = tl.arange(0, D)
        at = start // GROUP * HEAD_DIM + channels
        zero = tl.load(zeros + at, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)
        step = tl.load(steps + at, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)
        codes = _kivi_codes(part, entries, seen, STORAGE, D, HEAD_DIM)
        tile = zero[None, :] + step[None, :] * codes
    else:
        tile = _load_alone(part, zeros, levels, entries, seen, STORAGE, D, HEAD_DIM)
    return tile


@triton.jit
def load_values(
    part, zeros, steps, levels, entries, seen,
    STORAGE: tl.constexpr, CHANNELS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Values of `entries` [BLOCK]; CHANNELS share a zero point and a step of KIVI."""
    if STORAGE == "kivi4" or STORAGE == "kivi2":
        groups = tl.arange(0, D // CHANNELS)
        at = entries[:, None] * (HEAD_DIM // CHANNELS) + groups[None, :]
        inside = seen[:, None] & (groups < HEAD_DIM // CHANNELS)[None, :]
        zero = tl.load(zeros + at, mask=inside, other=0.0).to(tl.float32)
        step = tl.load(steps + at, mask=inside, other=0.0).to(tl.float32)
        codes = _kivi_codes(part, entries, seen, STORAGE, D, HEAD_DIM)
        tile = _per_channel(zero, CHANNELS, D) + _per_channel(step, CHANNELS, D) * codes
    else:
        tile = _load_alone(part, zeros, levels, entries, seen, STORAGE, D, HEAD_DIM)
    return tile


@triton.jit
def load_rows(part, entries, seen, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Vectors [BLOCK, D] that lie one behind the other."""
    channels = tl.arange(0, D)
    inside = seen[:, None]
    if D != HEAD_DIM:
        inside = inside & (channels < HEAD_DIM)[None, :]
    return tl.load(part + entries[:, None] * HEAD_DIM + channels[None, :], mask=inside, other=0)


@triton.jit
def _load_alone(part, scales, levels, entries, seen, STORAGE: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Entries that are stored each for itself, keys and values alike."""
    if STORAGE == "model":
        tile = load_rows(part, entries, seen, D, HEAD_DIM)
    elif STORAGE == "fp8":
        tile = _from_e4m3(load_rows(part, entries, seen, D, HEAD_DIM))
    else:
        channels = tl.arange(0, D)
        inside = seen[:, None] & (channels < HEAD_DIM)[None, :]
        if STORAGE == "turbo4":
            codes = _packed_codes(part + entries[:, None] * (HEAD_DIM // 2), channels, inside, 4, HEAD_DIM)
        else:
            row = part + entries[:, None] * (HEAD_DIM // 8 * 3)
            codes = _packed_codes(row, channels, inside, 2, HEAD_DIM)
            codes |= _packed_codes(row + HEAD_DIM // 4, channels, inside, 1, HEAD_DIM) << 2
        scale = tl.load(scales + entries, mask=seen, other=0.0).to(tl.float32)
        tile = tl.load(levels + codes) * scale[:, None]
    return tile


@triton.jit
def _from_e4m3(code):
    """E4M3 by moving its bits into a float32, whose exponent is 2^120 off: exact, subnormals included, on every GPU."""
    bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # sign, 4 bits exponent, 3 bits mantissa
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(tl.abs(number) == 480.0, float("nan"), number)  # all ones


@triton.jit
def _kivi_codes(part, entries, seen, STORAGE: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load KIVI codes: a byte holds one code from each of 8 / BITS equal stretches of its group (see `packing.py`)."""
    BITS: tl.constexpr = 4 if STORAGE == "kivi4" else 2
    ROWS: tl.constexpr = GROUP * BITS // 8
    inside = entries % GROUP
    packed = load_rows(part, entries // GROUP * ROWS + inside % ROWS, seen, D, HEAD_DIM).to(tl.int32)
    return ((packed >> (inside // ROWS * BITS)[:, None]) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _packed_codes(row, channels, inside, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Codes that are packed along the channels, in the same way."""
    STRETCH: tl.constexpr = HEAD_DIM * BITS // 8
    packed = tl.load(row + (channels % STRETCH)[None, :], mask=inside, other=0).to(tl.int32)
    return (packed >> (channels // STRETCH * BITS)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _per_channel(x, CHANNELS: tl.constexpr, D: tl.constexpr):
    """[BLOCK, D / CHANNELS] to [BLOCK, D]."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], D // CHANNELS, CHANNELS))
    return tl.reshape(wide, (x.shape[0], D))

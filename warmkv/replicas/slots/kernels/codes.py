"""Packed codes inside kernels: out of words of four bytes, along the channels, and into bytes again."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

OFFSET = tl.constexpr(128.0)
"""By how much numbers are larger than their codes."""


@triton.jit
def stretches(word, FROM: tl.constexpr, BITS: tl.constexpr):
    """Return the numbers in a byte of each word, which begins at bit FROM: [n, m] to [n, m, 8 / BITS]."""
    if BITS == 4:
        return tl.join(number(word, FROM, BITS), number(word, FROM + 4, BITS))
    else:  # noqa: RET505 - Triton compiles what follows a return, too
        even = tl.join(number(word, FROM, BITS), number(word, FROM + 4, BITS))
        odd = tl.join(number(word, FROM + 2, BITS), number(word, FROM + 6, BITS))
        return tl.reshape(tl.join(even, odd), (word.shape[0], word.shape[1], 4))


@triton.jit
def number(word, FROM: tl.constexpr, BITS: tl.constexpr):
    """Return the code at bit FROM of each word as float32, OFFSET too large.

    It is put into the bits of a number between 128 and 256, which takes fewer cycles than converting an integer.
    """
    shifted = word << (16 - FROM) if FROM < 16 else word >> (FROM - 16)
    bits = (shifted & (((1 << BITS) - 1) << 16)) | 0x43000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def along_channels(row, channels, inside, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load codes that are packed along the channels, one from each of 8 / BITS equal stretches (see `packing.py`)."""
    STRETCH: tl.constexpr = HEAD_DIM * BITS // 8
    byte = tl.load(row + (channels % STRETCH)[None, :], mask=inside, other=0).to(tl.int32)
    return (byte >> (channels // STRETCH * BITS)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def packed(code, BITS: tl.constexpr, STRETCHES: tl.constexpr, P: tl.constexpr):
    """Pack codes [STRETCHES, P] to bytes [P], one from each stretch."""
    return tl.sum(code << (tl.arange(0, STRETCHES) * BITS)[:, None], 0)


@triton.jit
def in_stretches(x, rotation, STRETCHES: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rotate a vector [D] into the stretches that codes are packed from: [STRETCHES, D / STRETCHES], and which of these
    are channels.
    """
    STRETCH: tl.constexpr = HEAD_DIM // STRETCHES
    P: tl.constexpr = D // STRETCHES
    inputs, stretches, within = tl.arange(0, D), tl.arange(0, STRETCHES), tl.arange(0, P)
    outputs = stretches[:, None] * STRETCH + within[None, :]
    inside = (within < STRETCH)[None, :] & (stretches >= 0)[:, None]
    at = inputs[:, None, None] * HEAD_DIM + outputs[None, :, :]
    matrix = tl.load(rotation + at, mask=(inputs < HEAD_DIM)[:, None, None] & inside[None, :, :], other=0.0)
    return tl.sum(x.to(tl.float32)[:, None, None] * matrix, 0), inside

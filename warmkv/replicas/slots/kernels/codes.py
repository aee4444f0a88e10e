"""Taking packed codes out of words of four bytes, as numbers, in few instructions."""
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

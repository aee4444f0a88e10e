"""FP8 inside a kernel: E4M3 by its bits."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots.kernels.tiles import Reader, load_rows


@triton.jit
def _load(
    part, second, third, table, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    return _from_e4m3(load_rows(part, entries, seen, D, HEAD_DIM))


@triton.jit
def _from_e4m3(code):
    """Convert E4M3 by moving its bits into a float32, whose exponent is 2^120 off: exact, subnormals included, on every
    GPU.
    """
    bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # sign, 4 bits exponent, 3 bits mantissa
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(tl.abs(number) == 480.0, float("nan"), number)  # all ones


READER = Reader(keys=_load, values=_load)

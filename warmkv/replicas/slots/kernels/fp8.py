"""FP8 inside a kernel: E4M3 by its bits."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from warmkv.replicas.slots.kernels.tiles import Reader, load_rows


@triton.jit
def _load(
    part, second, third, table, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    code = load_rows(part, entries, seen, D, HEAD_DIM)
    if cuda_capability_geq(8, 9):  # which converts them itself
        return code.to(tl.float8e4nv, bitcast=True)
    else:  # noqa: RET505 - Triton compiles what follows a return, too
        return _from_e4m3(code)


@triton.jit
def _from_e4m3(code):
    """Convert E4M3 by moving its bits into a float32, whose exponent is 2^120 off: exact, subnormals included, on every
    GPU.
    """
    bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # sign, 4 bits exponent, 3 bits mantissa
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(tl.abs(number) == 480.0, float("nan"), number)  # all ones


@triton.jit
def _put(
    part, second, entry, x, when, levels, rotation,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, D)
    tl.store(part + entry * HEAD_DIM + channels, _to_e4m3(x.to(tl.float32)), mask=(channels < HEAD_DIM) & when)


@triton.jit
def _to_e4m3(x):
    """Convert to E4M3, rounding to even, by the bits of float32: on every GPU what a cast does after clamping."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # exponents are 120 apart
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # whose spacing is that of subnormals, 2^-9
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)).to(tl.uint8)


READER = Reader(keys=_load, values=_load, put=_put)

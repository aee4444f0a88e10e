"""The model's own dtype inside a kernel: entries as they lie."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots.kernels.tiles import Reader, load_rows


@triton.jit
def _load(
    part, second, third, table, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    return load_rows(part, entries, seen, D, HEAD_DIM)


@triton.jit
def _put(
    part, second, entry, x, when, levels, rotation,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, D)
    tl.store(part + entry * HEAD_DIM + channels, x.to(part.dtype.element_ty), mask=(channels < HEAD_DIM) & when)


READER = Reader(keys=_load, values=_load, put=_put)

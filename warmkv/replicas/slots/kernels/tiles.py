"""Reading and writing entries inside a kernel, one behind the other, and how a storage format names what does so.

A reader does tile by tile what `decode_keys` and `decode_values` of its format do. Its functions for both are

    @triton.jit
    def keys(part, second, third, levels, start, entries, seen, BITS, D, HEAD_DIM)

and return a tile [BLOCK, D] of floating point numbers: D is the head dimension rounded up to a power of two. Pointers
are those of the row's parts, of which there may be three, and of the reader's table; `entries` [BLOCK] begin with
`start` where nothing is left out, and BLOCK is a group where the format has groups. What is beyond the head dimension,
and entries that are not `seen`, must not be loaded.

Of a format whose entries stand alone `put` encodes one: x [D] goes to `entry`, where `when` is true.

    @triton.jit
    def put(part, second, entry, x, when, levels, rotation, BITS, D, HEAD_DIM)
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# Triton compiles these functions from their source: annotations other than constexpr mean nothing to it.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor, device

from warmkv.policies.compression.storage_format import StorageFormat


@dataclass(frozen=True)
class Reader:
    """Reads a storage format in kernels: the `READER` of the module that `StorageFormat.kernel` names."""

    keys: Any
    values: Any
    put: Any = None  # of formats that are packed in groups there is none: new entries wait in the model's dtype
    table: Callable[[StorageFormat, device], Tensor] | None = None


@triton.jit
def load_rows(part, entries, seen, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load vectors [BLOCK, D] that lie one behind the other."""
    channels = tl.arange(0, D)
    inside = seen[:, None]
    if D != HEAD_DIM:
        inside = inside & (channels < HEAD_DIM)[None, :]
    return tl.load(part + entries[:, None] * HEAD_DIM + channels[None, :], mask=inside, other=0)

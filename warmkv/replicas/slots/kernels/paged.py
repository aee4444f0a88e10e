"""Entries in pages inside a kernel: pages lie anywhere, and a table has their addresses.

A page holds [2, layers, kv_heads, entries, head_dim], keys before values, as a block of the prefix cache does. The
table has, for each row, the addresses of the keys of its KV head in layer 0 of its pages; how far other layers' keys
and values are from there is the same in every page.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from warmkv.policies.compression.storages.model import ModelDtype
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.kernels import launch
from warmkv.replicas.slots.kernels.tiles import Reader

ALIGNED = tl.constexpr(kernels.ALIGNED)


@triton.jit
def _load(
    part, like, offset, table, start, entries, seen,
    BITS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Load a tile that lies in one page of BITS entries. part: the row's addresses; like: a pointer of the type of
    entries; offset: elements from an address to the layer's keys or values.
    """
    address = tl.multiple_of(tl.load(part + start // BITS).to(like.dtype), ALIGNED)
    channels = tl.arange(0, D)
    inside = seen[:, None]
    if D != HEAD_DIM:
        inside = inside & (channels < HEAD_DIM)[None, :]
    at = tl.load(offset) + (entries % BITS)[:, None] * HEAD_DIM + channels[None, :]
    return tl.load(address + at, mask=inside, other=0)


@triton.jit
def _write(
    keys, values, keys_row, values_row, table, table_row, entries, offsets,
    SIZE: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write a key and a value to the entry of each row; nothing where that is negative. Grid (rows,)."""
    row, channels = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    entry = tl.load(entries + row)
    inside = (channels < HEAD_DIM) & (entry >= 0)
    key = tl.load(keys + row * keys_row + channels, mask=inside, other=0)
    value = tl.load(values + row * values_row + channels, mask=inside, other=0)
    page = tl.maximum(entry, 0)
    address = tl.multiple_of(tl.load(table + row * table_row + page // SIZE).to(keys.dtype), ALIGNED)
    at = page % SIZE * HEAD_DIM + channels
    tl.store(address + tl.load(offsets) + at, key, mask=inside)
    tl.store(address + tl.load(offsets + 1) + at, value, mask=inside)


class InPages(ModelDtype):
    """The model's dtype in pages of `size` entries, as `launch.attend` sees it."""

    kernel = __name__

    def __init__(self, size: int) -> None:
        self.group = self.bits = size


def attend(query: Tensor, table: Tensor, offsets: Tensor, lengths: Tensor, size: int, scale: float) -> Tensor:
    """Run `warmkv.replicas.slots.kernels.attend_in_pages`."""
    like = query[:, 0, :1]
    keys, values = ((table, like, offset.expand(len(query), 1)) for offset in (offsets[:1], offsets[1:]))
    return launch.attend(query, InPages(size), keys, values, lengths, None, scale)


def write(keys: Tensor, values: Tensor, table: Tensor, offsets: Tensor, entries: Tensor, size: int) -> None:
    """Run `warmkv.replicas.slots.kernels.write_pages`."""
    if keys.dtype == torch.bfloat16 and keys.device.type == "cpu":  # Triton's interpreter has no bfloat16 of its own
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    head_dim = keys.shape[1]
    _write[len(entries),](
        keys, values, keys.stride(0), values.stride(0), table, table.stride(0), entries, offsets,
        SIZE=size, D=triton.next_power_of_2(head_dim), HEAD_DIM=head_dim,
        num_warps=1,
    )  # fmt: skip


READER = Reader(keys=_load, values=_load, paged=True)

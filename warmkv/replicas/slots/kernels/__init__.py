"""Decode attention on a GPU: what `attention.py` means, in one pass over the entries as they are stored.

A slab asks with `reads` whether the kernels take what it stores, and calls `attention.py` where they do not. Triton is
imported by the first call that runs a kernel.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots import attention
from warmkv.replicas.slots.attention import Parts

_HAS_TRITON = find_spec("triton") is not None  # without importing it
ALIGNED = 16
"""Bytes that addresses of pages are multiples of, which lets a GPU load so many at a time."""
_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def is_available(device: torch.device) -> bool:
    """Return True if kernels run on tensors of a device: on CUDA, and with TRITON_INTERPRET=1, slowly, on the CPU.

    Triton decides when it is first imported whether it interprets, so the variable must be set by then.
    """
    interpreted = device.type in ("cpu", "meta") and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and _HAS_TRITON


def reads(storage: StorageFormat, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernels read a storage format, for queries of that type, on that device."""
    return storage.kernel is not None and dtype in _TYPES and is_available(device)


def attend(
    query: Tensor,
    storage: StorageFormat,
    keys: Parts,
    values: Parts,
    lengths: Tensor,
    uncompressed_tail: tuple[Tensor, Tensor, Tensor] | None,
    scale: float,
    *,
    received: Tensor | None = None,
    adds: bool = False,
) -> Tensor:
    """Attend q [n, group, d] to entries as they are stored; returns the shape of q, zeros where a row sees nothing.

    keys, values: parts [n, packed / group, ...] of the format, of which row i sees the first `lengths`[i] entries;
    `uncompressed_tail`: keys and values [n, m, d] in the model's dtype, and a mask bool [n, m], True is seen. All may
    be views whose rows lie apart. `received` float32 [n, packed + m] takes the attention that each entry got, summed
    over the query heads: it is added if `adds`, else all is written, 0 for what is not seen. Raises ValueError if a row
    is not contiguous.

    Source: Flash-Decoding (Dao et al., 2023) for the splits, FlashAttention (arXiv 2205.14135) for the online softmax.
    """
    from warmkv.replicas.slots.kernels import launch

    return launch.attend(query, storage, keys, values, lengths, uncompressed_tail, scale, received=received, adds=adds)


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lowest: Tensor,
    highest: Tensor,
    lengths: Tensor,
    reads: Tensor,
    channels: Tensor,
    most: int,
    scale: float,
) -> Tensor:
    """Compute `attention.attend_pages`, reading only the entries that are chosen."""
    from warmkv.replicas.slots.kernels import launch

    capacity = keys.shape[1]
    entries = attention.choose_entries(query, lowest, highest, lengths, reads, channels, capacity, most, scale)
    pages = entries, torch.full_like(lengths, entries.shape[1]), 1  # the kernel takes an entry for a page of one
    return launch.attend(query, STORAGES["model"], (keys,), (values,), lengths, None, scale, pages=pages)


def reads_pages(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if rows may lie in pages: `attend_in_pages` and `write_pages` work there."""
    return reads(STORAGES["model"], dtype, device)


def attend_in_pages(query: Tensor, table: Tensor, offsets: Tensor, lengths: Tensor, size: int, scale: float) -> Tensor:
    """Attend q [n, group, d] to the first `lengths` [n] entries of rows in pages of `size` entries in q's dtype.

    A page is [2, layers, kv_heads, size, d]. table int64 [n, pages] has the addresses of the keys of each row's KV head
    in layer 0; `offsets` [2] are the elements from there to the layer's keys and to its values.
    """
    from warmkv.replicas.slots.kernels import paged

    return paged.attend(query, table, offsets, lengths, size, scale)


def write_pages(keys: Tensor, values: Tensor, table: Tensor, offsets: Tensor, entries: Tensor, size: int) -> None:
    """Write keys and values [n, d] to entries [n] of rows in pages as in `attend_in_pages`, none where negative."""
    from warmkv.replicas.slots.kernels import paged

    paged.write(keys, values, table, offsets, entries, size)

"""Starting the kernels of `decode.py`: the shapes of tiles and splits, workspace, strides.

All of it follows from shapes and never from values on the device, so that CUDA graphs can capture a call. The first
call of a kind compiles it: make one before a graph is captured.
"""

from __future__ import annotations

import math
from importlib import import_module

import torch
from torch import Tensor

from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.replicas.slots.attention import Parts
from warmkv.replicas.slots.kernels import decode
from warmkv.replicas.slots.kernels.tiles import Reader

MOST_SPLITS = 64
_PROGRAMS = 8  # per multiprocessor: a few run beside each other, and the last to start are a small part of all
_SPLIT_ENTRIES = 256  # fewer are not worth the partial result that they leave
_TILE_BYTES = 1 << 14  # of keys and of values each: two stages of both leave room for other programs
_UNCOMPRESSED_BLOCK = 32
_RECEIVED_BLOCK = 128


def split_count(rows: int, entries: int, processors: int) -> int:
    """Return the number of programs that each row is split into, so that few rows keep all processors busy too."""
    return max(1, min(_PROGRAMS * processors // max(rows, 1), entries // _SPLIT_ENTRIES, MOST_SPLITS))


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
    pages: tuple[Tensor, Tensor, int] | None = None,
    splits: int | None = None,
) -> Tensor:
    """Run `warmkv.replicas.slots.kernels.attend` by the kernels, in `splits` or as many splits as suit the device.

    pages: chosen int [n, most], how many of them count [n], and the entries of a page; only these are read.
    """
    assert storage.kernel is not None
    reader: Reader = import_module(storage.kernel).READER
    n, group, head_dim = query.shape
    dtype, device = query.dtype, query.device
    if storage.rotated:  # all in its basis, which is orthogonal
        query = storage.to_basis(query.float())
        uncompressed_tail = uncompressed_tail and (
            storage.to_basis(uncompressed_tail[0]),
            storage.to_basis(uncompressed_tail[1]),
            uncompressed_tail[2],
        )
    elif dtype == torch.bfloat16 and device.type == "cpu":
        query = query.float()  # Triton's interpreter would multiply the bits of bfloat16 as integers
    _require_rows(*keys, *values, *(uncompressed_tail or ()))
    if received is not None and (pages is not None or received.stride(-1) != 1):
        raise ValueError("the attention received is that of whole rows, and goes where rows are contiguous")

    capacity, m = keys[0].shape[1] * storage.group, uncompressed_tail[0].shape[1] if uncompressed_tail else 0
    splits = splits or split_count(n, pages[0].shape[1] * pages[2] if pages else capacity, _processors(device))
    padded = max(16, _power_of_two(head_dim))
    block = max(16, min(128, _TILE_BYTES // (padded * query.element_size())))
    if storage.group > 1:
        block = min(block, storage.group) if reader.paged else storage.group
    out = torch.empty(n, group, head_dim, dtype=dtype, device=device)
    parts = out if splits == 1 else query.new_empty(n, splits, group, head_dim, dtype=torch.float32)
    peaks, totals = query.new_empty(2, n, splits, group, dtype=torch.float32).unbind()
    logits = query.new_empty(n, group, capacity + m if received is not None else 0, dtype=torch.float32)
    absent = query  # for pointers that are not followed
    uncompressed_keys, uncompressed_values, mask = (
        (*uncompressed_tail[:2], uncompressed_tail[2].view(torch.uint8)) if uncompressed_tail else (absent,) * 3
    )
    chosen, counts, page = pages or (absent, absent, 1)
    decode.attend_split[n, splits](
        query, query.stride(0), query.stride(1),
        *_three(keys), *_three(values), reader.table(storage, device) if reader.table else absent,
        lengths, capacity,
        chosen, counts, page, chosen.shape[1],
        uncompressed_keys, uncompressed_values, mask,
        uncompressed_keys.stride(0), uncompressed_values.stride(0), mask.stride(0), m,
        scale * math.log2(math.e),
        parts, peaks, totals, logits,
        LOAD_KEYS=reader.keys, LOAD_VALUES=reader.values, BITS=storage.bits, WIDE=reader.wide,
        G=group, M=max(16, _power_of_two(group)),
        D=padded, HEAD_DIM=head_dim, BLOCK=block, UNCOMPRESSED_BLOCK=_UNCOMPRESSED_BLOCK,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        PAGED=pages is not None, UNCOMPRESSED=m > 0, WHOLE=splits == 1, LOGITS=received is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        decode.combine[n, group](
            parts, peaks, totals, out, splits, G=group, S=_power_of_two(splits), D=padded, HEAD_DIM=head_dim
        )
    out = storage.from_basis(out)
    if received is not None:  # last: whoever repeats a call that ran out of memory must not have counted yet
        decode.sum_received[n, -(-(capacity + m) // _RECEIVED_BLOCK)](
            logits, peaks, totals, lengths, mask, mask.stride(0), received, received.stride(0), capacity, m, splits,
            G=group, M=_power_of_two(group), S=_power_of_two(splits), BLOCK=_RECEIVED_BLOCK,
            UNCOMPRESSED=m > 0, ADDS=adds,
        )  # fmt: skip
    return out


def _require_rows(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"each row must be contiguous; of shape {tuple(tensor.shape)} strides are {tensor.stride()}"
            )


def _three(parts: Parts) -> tuple[Tensor | int, ...]:
    """Return pointers to three parts, and the distance between rows of each; the first stands in for those that are
    not.
    """
    three = (*parts, *parts[:1] * 2)[:3]
    return *three, *(part.stride(0) for part in three)


def _power_of_two(x: int) -> int:
    """Round `x` up to a power of two."""
    return 1 << (x - 1).bit_length()


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

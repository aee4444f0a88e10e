"""Starting the kernels: the shapes of tiles, workspace, strides.

All of it follows from what a `RowBatch` holds and never from values on the device, so that CUDA graphs can capture a
call. The first call of a kind compiles it, so there are few kinds, whatever is mixed in a batch (`slots/warm_up.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.replicas.slots.kernels import LaunchProgress, choose, decode, update
from warmkv.replicas.slots.kernels.tiles import Reader
from warmkv.replicas.slots.row_tables import MOST_SPLITS, RowBatch, RowTables

_TILE_BYTES = 1 << 14  # of keys and of values each: two stages of both leave room for other programs
_UNCOMPRESSED_BLOCK = 32
_SCORE_BLOCK = 128
_LEAST_BLOCK = 1024
_SEGMENTS_BLOCK, _SEGMENTS_BLOCKS = 32, 4  # segments of a tile, and tiles of a program
_SEGMENTS_WIDTH = 2048  # segments, times heads, that the one program of a row looks at together
_SPLITS_AT_ONCE = 32
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.uint8: tl.uint8}


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a split goes over its entries: so many at a time, by so many warps, with loads so many tiles ahead."""

    entries: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most: with fewer more programs run beside each other


def tiles_of(storage: StorageFormat, head_dim: int, dtype_bytes: int, page_size: int) -> Tiles:
    """Return the tiles that were fastest on H100s and H200s; `head_dim` is padded, `dtype_bytes` the model's."""
    if storage.group > 1:
        return Tiles(storage.group, 2, 2, 128 if head_dim * dtype_bytes <= 256 else None)
    entries = max(16, min(128, _TILE_BYTES // (head_dim * dtype_bytes)))
    if storage.rotated:  # whose levels are looked up: what is loaded ahead of that costs twice the time
        return Tiles(min(entries, 32), 2, 1)
    return Tiles(min(entries, page_size) if page_size else entries, 4, 3)


def attend(
    batch: RowBatch,
    tables: RowTables,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    out: Tensor,
    progress: LaunchProgress,
) -> None:
    """Run `warmkv.replicas.slots.kernels.attend`."""
    storage = batch.storage
    reader: Reader = import_module(storage.kernel or "").READER
    device, dtype, head_dim = query.device, query.dtype, query.shape[-1]
    group = query.shape[1] // key.shape[1]
    n, programs = len(batch.rows), len(batch.tasks)
    rows = tables.facts, tables.numbers, tables.facts.shape[1], batch.rows, batch.places, layer
    absent = tables.facts  # for pointers that are not followed
    levels = reader.table(storage, device) if reader.table else absent
    rotation = storage.rotation(head_dim, device) if storage.rotated else absent
    if dtype == torch.bfloat16 and device.type == "cpu":
        query = query.float()  # Triton's interpreter would multiply the bits of bfloat16 as integers
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    padded, heads = max(16, _power_of_two(head_dim)), max(16, _power_of_two(group))
    turned = tables.workspace("query", (*query.shape,), torch.float32) if storage.rotated else query
    # What rows of a batch ask for beyond appending is compiled together: a kernel looks row by row for what is due.
    special = batch.scored or batch.rebased
    page_size = tables.page_size if storage.plain else 0
    types: dict[str, Any] = {"TYPE": _TYPES[dtype], "FIRST": _TYPES[batch.first_type], "OTHERS": tl.float16}
    sizes = {"KV_HEADS": key.shape[1], "G": group, "D": padded, "HEAD_DIM": head_dim}
    update.put[n,](
        query, query.stride(0), query.stride(1),
        key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1),
        *rows, tables.taken[layer], int(progress.put), int(progress.counted), levels, rotation, tables.inv_freq, turned,
        PUT=reader.put, BITS=storage.bits, **types, ALIGNED=batch.aligned, **sizes, BLOCK=_LEAST_BLOCK,
        EVICTS=special and storage.group == 1, AGED=special or batch.windowed, SEGMENTED=batch.segmented,
        REBASED=special, GROUPED=storage.group > 1, ROTATED=storage.rotated, PAGE_SIZE=page_size,
    )  # fmt: skip
    progress.put, query = True, turned
    chosen, counts = absent, absent
    if batch.segmented:
        chosen = tables.workspace("chosen", (n, batch.most_read), torch.int32)
        counts = tables.workspace("counts", (n,), torch.int32)
        estimates = tables.workspace("estimates", (n, batch.most_segments), torch.float32)
        logits = tables.workspace("logits of segments", (n, group, batch.most_segments), torch.float32)
        choose.estimate_segments[n, -(-batch.most_segments // (_SEGMENTS_BLOCK * _SEGMENTS_BLOCKS))](
            query, query.stride(0), query.stride(1), *rows, softmax.scale * math.log2(math.e),
            logits, batch.most_segments,
            TYPE=_TYPES[dtype], ALIGNED=batch.aligned, M=heads, **sizes,
            BLOCK=_SEGMENTS_BLOCK, BLOCKS=_SEGMENTS_BLOCKS,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        choose.choose_entries[n,](
            *rows[:4], logits, estimates, batch.most_segments, chosen, counts, batch.most_read,
            G=group, GROUP=_power_of_two(group), WIDTH=_SEGMENTS_WIDTH // _power_of_two(group), BLOCK=_SEGMENTS_WIDTH,
            num_warps=8,
        )  # fmt: skip
    whole = programs == n and softmax.sinks is None and not storage.rotated
    partials = tables.workspace("partials", (programs, group, head_dim), torch.float32) if not whole else absent
    peaks = tables.workspace("peaks", (programs, group), torch.float32)
    totals = tables.workspace("totals", (programs, group), torch.float32)
    logits = tables.workspace("logits", (batch.logits * group,), torch.float32) if special else absent
    tiles = tiles_of(storage, padded, dtype.itemsize, page_size)
    decode.attend_split[programs,](
        query, query.stride(0), query.stride(1), *rows, batch.tasks, batch.first_splits,
        chosen, counts, batch.most_read, levels, tables.inv_freq, batch.logits_at,
        softmax.scale * math.log2(math.e), (softmax.softcap or 1.0) * math.log2(math.e),
        out, partials, peaks, totals, logits,
        LOAD_KEYS=reader.keys, LOAD_VALUES=reader.values, BITS=storage.bits, **types,
        ALIGNED=batch.aligned, M=heads, **sizes, BLOCK=tiles.entries, UNCOMPRESSED_BLOCK=_UNCOMPRESSED_BLOCK,
        PRECISION=precision, CHOSEN=batch.segmented, GROUPED=storage.group > 1, REBASED=special,
        WINDOWED=batch.windowed, CAPPED=softmax.softcap is not None, SCORED=special, WHOLE=whole,
        PAGE_SIZE=page_size,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip
    sinks = absent if softmax.sinks is None else softmax.sinks
    if not whole:
        decode.combine[n, group](
            partials, peaks, totals, batch.rows, batch.places, batch.first_splits, sinks, rotation, out,
            **sizes, S=_SPLITS_AT_ONCE, SINKS=softmax.sinks is not None, ROTATED=storage.rotated,
        )  # fmt: skip
    if (
        batch.scored and not progress.counted
    ):  # last: whoever repeats a call that ran out of memory must not have counted yet
        decode.sum_received[n, -(-batch.most_entries // _SCORE_BLOCK)](
            logits, batch.logits_at, peaks, totals, sinks, *rows, batch.first_splits,
            KV_HEADS=key.shape[1], G=group, M=_power_of_two(group), S=MOST_SPLITS, BLOCK=_SCORE_BLOCK,
            GROUPED=storage.group > 1, WINDOWED=batch.windowed, SINKS=softmax.sinks is not None,
        )  # fmt: skip
        progress.counted = True


def _power_of_two(x: int) -> int:
    """Round `x` up to a power of two."""
    return 1 << (x - 1).bit_length()

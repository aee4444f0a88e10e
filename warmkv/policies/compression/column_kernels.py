"""Column sums on a GPU in two passes over tiles that never leave it: log-sums of every query, then sums of every key.

No matrix of logits exists: 128K tokens take the bytes of their log-sums, 4 for each query and head, and twice the
products of attention. Grids follow from shapes alone.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax

_BLOCK = 64
_ANY = ["queries_head", "queries_row", "keys_head", "start", "count", "end", "window", "sums_row"]
"""Numbers that differ among prompts and chunks: a kernel is not compiled anew for those that 16 divides."""


@triton.jit(do_not_specialize=_ANY)
def _log_sums(
    queries, queries_head, queries_row, keys, keys_head, sinks, log_sums,
    start, count, end, window, scale, softcap,
    G: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum of each query's logits, in powers of two: grid (blocks of queries, q_heads)."""
    queries_head, queries_row = _known(queries_head, HEAD_DIM), _known(queries_row, HEAD_DIM)
    keys_head = _known(keys_head, HEAD_DIM)
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    q = _rows(queries + head * queries_head, rows, queries_row, rows < count, D, HEAD_DIM)
    own = keys + head // G * keys_head
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if SINKS:
        peak = tl.zeros([BLOCK], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    last = tl.minimum(start + tl.program_id(0) * BLOCK + BLOCK, end)
    first = tl.where(window > 0, tl.maximum(start + tl.program_id(0) * BLOCK - window + 1, 0), 0) // BLOCK * BLOCK
    for at in tl.range(first, last, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        k = _rows(own, columns, HEAD_DIM, columns < end, D, HEAD_DIM)
        logits = _logits(q, k, rows + start, columns, rows < count, end, window, scale, softcap, CAPPED, PRECISION)
        higher = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        peak = higher
    tl.store(log_sums + head * count + rows, peak + tl.log2(total), mask=rows < count)


@triton.jit(do_not_specialize=_ANY)
def _column_sums(
    queries, queries_head, queries_row, keys, keys_head, log_sums, sums, sums_row,
    start, count, end, window, scale, softcap,
    G: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Add what each key receives from all queries of its group: grid (blocks of keys, kv_heads)."""
    queries_head, queries_row = _known(queries_head, HEAD_DIM), _known(queries_row, HEAD_DIM)
    keys_head = _known(keys_head, HEAD_DIM)
    head = tl.program_id(1)
    begin = tl.program_id(0) * BLOCK
    columns = begin + tl.arange(0, BLOCK)
    k = _rows(keys + head * keys_head, columns, HEAD_DIM, columns < end, D, HEAD_DIM)
    received = tl.zeros([BLOCK], tl.float32)
    first = tl.maximum(begin - start, 0) // BLOCK * BLOCK  # queries before see none of these keys
    last = tl.where(window > 0, tl.minimum(begin + BLOCK + window - start, count), count)
    for one in tl.range(head * G, head * G + G):
        for at in tl.range(first, last, BLOCK):
            rows = at + tl.arange(0, BLOCK)
            q = _rows(queries + one * queries_head, rows, queries_row, rows < count, D, HEAD_DIM)
            logits = _logits(q, k, rows + start, columns, rows < count, end, window, scale, softcap, CAPPED, PRECISION)
            log_sum = tl.load(log_sums + one * count + rows, mask=rows < count, other=0.0)
            received += tl.sum(tl.exp2(logits - log_sum[:, None]), 0)
    sums += head * sums_row + columns
    tl.store(sums, tl.load(sums, mask=columns < end, other=0.0) + received, mask=columns < end)


@triton.jit
def _known(stride, HEAD_DIM: tl.constexpr):
    """Return a stride with what the compiler may know of it: it is a multiple of the head dimension."""
    if HEAD_DIM % 16 == 0:
        stride = tl.multiple_of(stride, 16)
    return stride


@triton.jit
def _rows(part, rows, stride, inside, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    channels = tl.arange(0, D)
    return tl.load(
        part + rows.to(tl.int64)[:, None] * stride + channels[None, :],
        mask=inside[:, None] & (channels < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def _logits(
    q, k, positions, columns, inside, end, window, scale, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAPPED:
        power = tl.exp(-2.0 * tl.abs(logits / softcap))
        logits = tl.where(logits < 0, -softcap, softcap) * (1.0 - power) / (1.0 + power)
    seen = inside[:, None] & (columns < end)[None, :] & (columns[None, :] <= positions[:, None])
    seen &= (window == 0) | (columns[None, :] > positions[:, None] - window)
    return tl.where(seen, logits, float("-inf"))


def add_column_sums(sums: Tensor, queries: Tensor, keys: Tensor, start: int, softmax: Softmax) -> None:
    """Run `prefill_state.add_column_sums` by kernels."""
    kv_heads, end, head_dim = keys.shape
    q_heads, count, _ = queries.shape
    if queries.dtype == torch.bfloat16 and queries.device.type == "cpu":  # which Triton's interpreter cannot multiply
        queries, keys = queries.float(), keys.float()
    if queries.stride(-1) != 1 or any(stride % head_dim for stride in queries.stride()[:2]):
        queries = queries.contiguous()
    if keys.stride()[1:] != (head_dim, 1) or keys.stride(0) % head_dim:
        keys = keys.contiguous()
    log_sums = queries.new_empty(q_heads, count, dtype=torch.float32)
    power = math.log2(math.e)
    numbers = start, count, end, softmax.window, softmax.scale * power, (softmax.softcap or 1.0) * power
    shape = {
        "G": q_heads // kv_heads,
        "D": max(16, triton.next_power_of_2(head_dim)),
        "HEAD_DIM": head_dim,
        "BLOCK": _BLOCK,
        "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32",
        "CAPPED": softmax.softcap is not None,
    }
    of = queries, queries.stride(0), queries.stride(1), keys, keys.stride(0)
    sinks = queries if softmax.sinks is None else softmax.sinks.flatten()
    _log_sums[triton.cdiv(count, _BLOCK), q_heads](
        *of, sinks, log_sums, *numbers, **shape, SINKS=softmax.sinks is not None
    )
    _column_sums[triton.cdiv(end, _BLOCK), kv_heads](*of, log_sums, sums, sums.stride(0), *numbers, **shape)

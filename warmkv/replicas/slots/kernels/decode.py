"""Decode attention in Triton: one query per row, split along the entries, and what puts the splits together.

A program takes one row and one split of its entries (Flash-Decoding), with the query heads of the group as one tile, so
that keys and values are read once. Softmax is kept online in float32, in powers of two.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots.kernels.tiles import load_rows


@triton.jit
def attend_split(
    query, query_row, query_head,
    keys, keys_second, keys_third, keys_row, keys_second_row, keys_third_row,
    values, values_second, values_third, values_row, values_second_row, values_third_row,
    table, lengths, capacity,
    pages, page_counts, page, most_pages,
    uncompressed_keys, uncompressed_values, uncompressed_mask,
    uncompressed_keys_row, uncompressed_values_row, uncompressed_mask_row, uncompressed_count,
    scale,
    out, peaks, totals, logits,
    LOAD_KEYS: tl.constexpr, LOAD_VALUES: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
    G: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, UNCOMPRESSED_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, PAGED: tl.constexpr, UNCOMPRESSED: tl.constexpr, WHOLE: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """Attend over one split of a row. Grid (rows, splits). WHOLE: there is one split, and `out` is the result [n, G, d]
    rather than a part of it.

    out float32 [n, splits, G, d]: sums of values, not yet divided; peaks, totals [n, splits, G]: the largest logit and
    the sum of powers above it; logits [n, G, capacity + uncompressed_count], all in powers of two.
    """
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    heads, channels = tl.arange(0, M), tl.arange(0, D)
    in_tile = (heads < G)[:, None] & (channels < HEAD_DIM)[None, :]
    q = tl.load(query + row * query_row + heads[:, None] * query_head + channels[None, :], mask=in_tile, other=0.0)
    wide = q.to(tl.float32) if WIDE else q

    length = tl.minimum(tl.load(lengths + row).to(tl.int32), capacity)
    reach = length  # as counted by the loop: entries, or those of the chosen pages one after the other
    if PAGED:
        reach = tl.minimum(tl.load(page_counts + row).to(tl.int32), most_pages) * page
    blocks = tl.cdiv(tl.cdiv(reach, BLOCK), splits)  # a row's own length is shared among the splits
    first = split * blocks * BLOCK
    last = tl.minimum(first + blocks * BLOCK, reach)

    keys += row * keys_row
    values += row * values_row
    keys_second += row * keys_second_row
    keys_third += row * keys_third_row
    values_second += row * values_second_row
    values_third += row * values_third_row
    logits += row * G * (capacity + uncompressed_count)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in tl.range(first, last, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        seen = entries < last
        if PAGED:
            chosen = tl.load(pages + row * most_pages + entries // page, mask=seen, other=0).to(tl.int32)
            entries = chosen * page + entries % page
            seen &= entries < length
        k = LOAD_KEYS(keys, keys_second, keys_third, table, start, entries, seen, BITS, D, HEAD_DIM)
        v = LOAD_VALUES(values, values_second, values_third, table, start, entries, seen, BITS, D, HEAD_DIM)
        k, v = k.to(wide.dtype), v.to(wide.dtype)
        scores = _scores(wide, k, seen, scale, PRECISION)
        if LOGITS:
            at = heads[:, None] * (capacity + uncompressed_count) + entries[None, :]
            tl.store(logits + at, scores, mask=(heads < G)[:, None] & seen[None, :])
        peak, total, acc = _add(peak, total, acc, scores, v, PRECISION)

    if UNCOMPRESSED:
        uncompressed_keys += row * uncompressed_keys_row
        uncompressed_values += row * uncompressed_values_row
        mine = tl.where(split == splits - 1, uncompressed_count, 0)
        for start in tl.range(0, mine, UNCOMPRESSED_BLOCK):
            entries = start + tl.arange(0, UNCOMPRESSED_BLOCK)
            seen = entries < uncompressed_count
            seen &= tl.load(uncompressed_mask + row * uncompressed_mask_row + entries, mask=seen, other=0) != 0
            k = load_rows(uncompressed_keys, entries, seen, D, HEAD_DIM).to(q.dtype)
            v = load_rows(uncompressed_values, entries, seen, D, HEAD_DIM).to(q.dtype)
            scores = _scores(q, k, seen, scale, PRECISION)
            if LOGITS:
                at = heads[:, None] * (capacity + uncompressed_count) + capacity + entries[None, :]
                tl.store(logits + at, scores, mask=(heads < G)[:, None] & seen[None, :])
            peak, total, acc = _add(peak, total, acc, scores, v, PRECISION)

    part = row * splits + split
    if WHOLE:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # of a row that sees nothing: 0
    at = part * G * HEAD_DIM + heads[:, None] * HEAD_DIM + channels[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_tile)
    if LOGITS or not WHOLE:
        tl.store(peaks + part * G + heads, peak, mask=heads < G)
        tl.store(totals + part * G + heads, total, mask=heads < G)


@triton.jit
def _scores(q, k, seen, scale, PRECISION: tl.constexpr):
    """Compute logits float32 [M, BLOCK]: products are exact and summed in float32 before they are scaled."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    return tl.where(seen[None, :], scores, float("-inf"))


@triton.jit
def _add(peak, total, acc, scores, v, PRECISION: tl.constexpr):
    """Take a block into the running softmax."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no -inf minus -inf
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def combine(
    parts, peaks, totals, out, splits,
    G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a query head to its output: grid (rows, G)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, D)
    part = row * splits + tl.arange(0, S)
    inside = tl.arange(0, S) < splits
    peak = tl.load(peaks + part * G + head, mask=inside, other=float("-inf"))
    weight = tl.exp2(peak - _base(tl.max(peak, 0)))
    total = tl.sum(tl.load(totals + part * G + head, mask=inside, other=0.0) * weight, 0)
    at = (part * G + head)[:, None] * HEAD_DIM + channels[None, :]
    acc = tl.load(parts + at, mask=inside[:, None] & (channels < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    at_out = (row * G + head) * HEAD_DIM + channels
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=channels < HEAD_DIM)


@triton.jit
def sum_received(
    logits, peaks, totals, lengths, uncompressed_mask, uncompressed_mask_row, received, received_row,
    capacity, uncompressed_count, splits,
    G: tl.constexpr, M: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    UNCOMPRESSED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Sum the attention that each entry received over all query heads of the group: grid (rows, blocks of entries)."""
    row = tl.program_id(0).to(tl.int64)
    heads, parts = tl.arange(0, M), tl.arange(0, S)
    inside = (heads < G)[:, None] & (parts < splits)[None, :]
    at = (row * splits + parts)[None, :] * G + heads[:, None]
    peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
    base = _base(tl.max(peak, 1))
    total = tl.sum(tl.load(totals + at, mask=inside, other=0.0) * tl.exp2(peak - base[:, None]), 1)

    count = capacity + uncompressed_count
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = entries < tl.minimum(tl.load(lengths + row).to(tl.int32), capacity)
    if UNCOMPRESSED:
        behind = (entries >= capacity) & (entries < count)
        waiting = tl.load(uncompressed_mask + row * uncompressed_mask_row + entries - capacity, mask=behind, other=0)
        seen |= behind & (waiting != 0)
    shown = (heads < G)[:, None] & seen[None, :]
    scores = tl.load(logits + (row * G + heads)[:, None] * count + entries[None, :], mask=shown, other=float("-inf"))
    shares = tl.exp2(scores - base[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
    fresh = tl.sum(tl.where(shown, shares, 0.0), 0)
    received += row * received_row + entries
    if ADDS:
        tl.store(received, tl.load(received, mask=seen, other=0.0) + fresh, mask=seen)
    else:
        tl.store(received, fresh, mask=entries < count)


@triton.jit
def _base(peak):
    return tl.where(peak == float("-inf"), 0.0, peak)

"""RocketKV's second stage: which entries a step reads, chosen by segments (arXiv 2502.14051, section 3.3)."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots.kernels import table
from warmkv.replicas.slots.kernels.tiles import load_rows


@triton.jit(do_not_specialize=["query_sequence", "query_head", "count", "layer", "most_segments"])
def estimate_segments(
    query, query_sequence, query_head,
    facts, numbers, count, rows, places, layer, scale,
    logits, most_segments,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Estimate the logits of segments, in powers of two: grid (n, segments by BLOCK * BLOCKS).

    logits float32 [n, G, most_segments] takes them, for rows whose segments are chosen.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    if row < 0:
        return
    segment = table.number(facts, count, row, table.SEGMENT).to(tl.int32)
    if segment == 0:
        return
    length = table.number(numbers, count, row, table.PACKED).to(tl.int32)
    segments = tl.cdiv(length, segment)
    begin = tl.program_id(1) * (BLOCK * BLOCKS)
    if begin >= segments:
        return
    place = tl.load(places + index)
    heads, channels = tl.arange(0, M), tl.arange(0, D)
    in_tile = (heads < G)[:, None] & (channels < HEAD_DIM)[None, :]
    query_sequence, query_head = table.strides(query_sequence, query_head, HEAD_DIM)
    query += place // KV_HEADS * query_sequence + place % KV_HEADS * G * query_head
    loaded = tl.load(query + heads[:, None] * query_head + channels[None, :], mask=in_tile, other=0.0)
    q = loaded.to(tl.float32)
    size = tl.sum(tl.abs(q), 0)
    # How many channels of the group are larger, or as large and before it.
    order = tl.where(channels < HEAD_DIM, size, -1.0)
    before = (order[None, :] > order[:, None]) | (
        (order[None, :] == order[:, None]) & (channels[None, :] < channels[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    part = tl.where((rank < table.number(numbers, count, row, table.CHANNELS))[None, :], q, 0.0)
    positive = tl.sum(q, 0) > 0
    seen = tl.sum(tl.abs(part), 1) / tl.maximum(tl.sum(tl.abs(q), 1), 1e-30)
    scales = scale * tl.rsqrt(tl.maximum(seen, 1e-30))  # makes up for the channels left out
    greatest = tl.where(positive[None, :], part, 0.0).to(loaded.dtype)
    least = tl.where(positive[None, :], 0.0, part).to(loaded.dtype)

    lowest = table.pointer(facts, count, row, layer, table.LOWEST, TYPE, ALIGNED)
    highest = table.pointer(facts, count, row, layer, table.HIGHEST, TYPE, ALIGNED)
    logits += index * G * most_segments + heads[:, None] * most_segments
    for start in tl.range(begin, tl.minimum(begin + BLOCK * BLOCKS, segments), BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < segments
        upper = load_rows(highest, at, inside, D, HEAD_DIM).to(loaded.dtype)
        lower = load_rows(lowest, at, inside, D, HEAD_DIM).to(loaded.dtype)
        found = tl.dot(greatest, tl.trans(upper), input_precision=PRECISION)
        found += tl.dot(least, tl.trans(lower), input_precision=PRECISION)
        tl.store(logits + at[None, :], found * scales[:, None], mask=(heads < G)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count", "most_segments", "most_chosen"])
def choose_entries(
    facts, numbers, count, rows,
    logits, estimates, most_segments, chosen, chosen_counts, most_chosen,
    G: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the entries that a row reads, as `attention.choose_entries`: grid (n,). GROUP: G as a power of two.

    chosen int32 [n, most_chosen] takes them, chosen_counts int32 [n] their number, -1 where all are read; estimates
    float32 [n, most_segments] is for what segments promise.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    if row < 0:
        return
    segment = table.number(facts, count, row, table.SEGMENT).to(tl.int32)
    if segment == 0:
        tl.store(chosen_counts + index, -1)
        return
    length = table.number(numbers, count, row, table.PACKED).to(tl.int32)
    wanted = tl.minimum(table.number(numbers, count, row, table.READ_LIMIT).to(tl.int32), length)
    segments = tl.cdiv(length, segment)
    estimates += index * most_segments
    heads = tl.arange(0, GROUP)
    logits += index * G * most_segments + heads[:, None] * most_segments
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    for start in tl.range(0, segments, WIDTH):
        at = start + tl.arange(0, WIDTH)
        inside = (heads < G)[:, None] & (at < segments)[None, :]
        found = tl.load(logits + at[None, :], mask=inside, other=float("-inf"))
        in_use = tl.minimum(tl.maximum(length - at * segment, 0), segment)
        higher = tl.maximum(peak, tl.max(found, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(found - base[:, None]) * in_use[None, :].to(tl.float32)  # one logit for all its entries
        total = total * tl.exp2(peak - base) + tl.sum(weights, 1)
        peak = higher
    peak, total = tl.where(heads < G, peak, 0.0), tl.where(heads < G, total, 1.0)
    for start in tl.range(0, segments, WIDTH):
        at = start + tl.arange(0, WIDTH)
        inside = (heads < G)[:, None] & (at < segments)[None, :]
        found = tl.load(logits + at[None, :], mask=inside, other=float("-inf"))
        shares = tl.exp2(found - peak[:, None]) / total[:, None]
        estimate = tl.sum(shares, 0) / G
        # NaN, whose bits are above all numbers, promises nothing: as many entries are chosen as of other rows.
        tl.store(estimates + at, tl.where(estimate == estimate, estimate, 0.0), mask=at < segments)
    tl.debug_barrier()

    # The greatest estimate, by its bits, of which segments with as much or more have the entries wanted.
    low, high = tl.zeros([], tl.int32), tl.full([], 0x3F800001, tl.int32)
    for _ in tl.range(0, 31):
        middle = low + (high - low) // 2
        above = tl.zeros([], tl.int32)
        for start in tl.range(0, segments, BLOCK):
            bits, in_use = _bits(estimates, start, segments, segment, length, BLOCK)
            above += tl.sum(tl.where(bits >= middle, in_use, 0), 0)
        enough = above >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    certain = tl.zeros([], tl.int32)
    for start in tl.range(0, segments, BLOCK):
        bits, in_use = _bits(estimates, start, segments, segment, length, BLOCK)
        certain += tl.sum(tl.where(bits > low, in_use, 0), 0)
    remaining = wanted - certain  # of equals those of lower position
    taken = tl.zeros([], tl.int32)
    chosen += index * most_chosen
    for start in tl.range(0, segments, BLOCK):
        bits, in_use = _bits(estimates, start, segments, segment, length, BLOCK)
        equal = tl.where(bits == low, in_use, 0)
        room = tl.maximum(remaining - (tl.cumsum(equal, 0) - equal), 0)
        takes = tl.where(bits > low, in_use, tl.minimum(equal, room))
        remaining -= tl.sum(tl.minimum(equal, room), 0)
        first = taken + tl.cumsum(takes, 0) - takes
        at = start + tl.arange(0, BLOCK)
        for entry in tl.range(0, segment):
            inside = (entry < takes) & (first + entry < most_chosen)  # never behind the list, whatever is estimated
            tl.store(chosen + first + entry, at * segment + entry, mask=inside)
        taken += tl.sum(takes, 0)
    tl.store(chosen_counts + index, tl.minimum(taken, most_chosen))


@triton.jit
def _bits(estimates, start, segments, segment, length, BLOCK: tl.constexpr):
    """Load estimates, which are not negative: their bits are in the order of the numbers."""
    at = start + tl.arange(0, BLOCK)
    estimate = tl.load(estimates + at, mask=at < segments, other=0.0)
    in_use = tl.minimum(tl.maximum(length - at * segment, 0), segment)
    return tl.where(at < segments, estimate.to(tl.int32, bitcast=True), -1), in_use

"""Decode attention in Triton: one query per row, split along the entries, and what puts the splits together.

A program takes one row and one split of its entries (Flash-Decoding), with the query heads of the group as one tile, so
that keys and values are read once. Softmax is kept online in float32, in powers of two. Rows lie where the tables of
`table.py` say; `rows` names them, `places` their place in the batch, and both have -1 where there is none.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots.kernels import table
from warmkv.replicas.slots.kernels.tiles import load_rows

_ANY = ["query_sequence", "query_head", "count", "layer", "most_chosen"]
"""Numbers that differ among batches and layers: a kernel is not compiled anew for those that 16 divides."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=_ANY)
def attend_split(
    query, query_sequence, query_head,
    facts, numbers, count, rows, places, layer,
    tasks, first_splits,
    chosen, chosen_counts, most_chosen,
    levels, inv_freq, logits_at,
    scale, softcap,
    out, partials, peaks, totals, logits,
    LOAD_KEYS: tl.constexpr, LOAD_VALUES: tl.constexpr, BITS: tl.constexpr,
    TYPE: tl.constexpr, FIRST: tl.constexpr, OTHERS: tl.constexpr, ALIGNED: tl.constexpr,
    KV_HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, UNCOMPRESSED_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    CHOSEN: tl.constexpr, GROUPED: tl.constexpr, REBASED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SCORED: tl.constexpr, WHOLE: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Attend over one split of a row, named by `tasks` [programs]; those of a row follow each other from `first_splits`
    [n + 1] on. WHOLE: every row has one, and `out` [places, G, d] takes the result.

    partials float32 [programs, G, d]: sums of values, not yet divided; peaks, totals [programs, G]: the largest logit
    and the sum of powers above it; logits: of scored rows [G, capacity + uncompressed] from `logits_at` on. All in
    powers of two.
    """
    program = tl.program_id(0).to(tl.int64)
    index = tl.load(tasks + program)
    if index < 0:
        return
    row = tl.load(rows + index)
    place = tl.load(places + index)
    heads, channels = tl.arange(0, M), tl.arange(0, D)
    in_tile = (heads < G)[:, None] & (channels < HEAD_DIM)[None, :]
    if row < 0:
        if WHOLE:
            at = place * G * HEAD_DIM + heads[:, None] * HEAD_DIM + channels[None, :]
            tl.store(out + at, tl.zeros([M, D], out.dtype.element_ty), mask=in_tile)
        return
    first_split = tl.load(first_splits + index)
    split, splits = program - first_split, tl.load(first_splits + index + 1) - first_split
    query_sequence, query_head = table.strides(query_sequence, query_head, HEAD_DIM)
    query += place // KV_HEADS * query_sequence + place % KV_HEADS * G * query_head
    q = tl.load(query + heads[:, None] * query_head + channels[None, :], mask=in_tile, other=0.0)

    capacity = table.number(facts, count, row, table.CAPACITY)
    length = tl.minimum(table.number(numbers, count, row, table.PACKED), capacity).to(tl.int32)
    reach = length  # as counted by the loop: entries, or those that were chosen one after the other
    if CHOSEN:
        chosen_count = tl.load(chosen_counts + index)
        chosen += index * most_chosen
        reach = tl.where(chosen_count < 0, length, chosen_count)
    blocks = tl.cdiv(tl.cdiv(reach, BLOCK), splits.to(tl.int32))  # a row's own length is shared among its splits
    first = split.to(tl.int32) * blocks * BLOCK
    last = tl.minimum(first + blocks * BLOCK, reach)

    keys = table.pointer(facts, count, row, layer, table.KEYS, FIRST, ALIGNED)
    keys_second = table.pointer(facts, count, row, layer, table.KEYS_SECOND, OTHERS, ALIGNED)
    keys_third = table.pointer(facts, count, row, layer, table.KEYS_THIRD, OTHERS, ALIGNED)
    values = table.pointer(facts, count, row, layer, table.VALUES, FIRST, ALIGNED)
    values_second = table.pointer(facts, count, row, layer, table.VALUES_SECOND, OTHERS, ALIGNED)
    values_third = table.pointer(facts, count, row, layer, table.VALUES_THIRD, OTHERS, ALIGNED)
    window = tl.zeros([], tl.int64)
    oldest = tl.zeros([], tl.int64)
    ages = table.pointer(facts, count, row, layer, table.AGES, tl.int32, False)
    if WINDOWED:
        window = table.number(facts, count, row, table.WINDOW)
        oldest = table.number(numbers, count, row, table.AGE) - window
    if PAGE_SIZE > 0:
        in_pages = table.number(facts, count, row, table.PAGE_SIZE) != 0
        keys_base, keys_further = table.location(facts, count, row, layer, table.KEYS)
        values_base, values_further = table.location(facts, count, row, layer, table.VALUES)
        listed = in_pages & (first < last)
        keys_page = table.page_address(keys_base, listed, first // PAGE_SIZE)
        values_page = table.page_address(values_base, listed, first // PAGE_SIZE)
    scored = False
    uncompressed = table.number(facts, count, row, table.UNCOMPRESSED)
    width = capacity + uncompressed
    if SCORED:
        at_logits = tl.load(logits_at + index)
        scored = at_logits >= 0
        logits += tl.maximum(at_logits, 0) * G
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in tl.range(first, last, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        seen = entries < last
        if CHOSEN:
            picked = seen & (chosen_count >= 0)
            entries = tl.where(picked, tl.load(chosen + entries, mask=picked, other=0), entries)
        if WINDOWED:
            known = seen & (window > 0)
            seen &= (window == 0) | (tl.load(ages + entries, mask=known, other=0) > oldest)
        if PAGE_SIZE > 0:  # a tile lies in one page; where the next one lies is read while this one is
            keys = table.page_pointer(facts, keys_page, keys_further, FIRST, ALIGNED)
            values = table.page_pointer(facts, values_page, values_further, FIRST, ALIGNED)
            listed = in_pages & (start + BLOCK < last)
            keys_page = table.page_address(keys_base, listed, (start + BLOCK) // PAGE_SIZE)
            values_page = table.page_address(values_base, listed, (start + BLOCK) // PAGE_SIZE)
            entries = tl.where(in_pages, entries % PAGE_SIZE, entries)
        k = LOAD_KEYS(keys, keys_second, keys_third, levels, start, entries, seen, BITS, D, HEAD_DIM)
        v = LOAD_VALUES(values, values_second, values_third, levels, start, entries, seen, BITS, D, HEAD_DIM)
        k, v = k.to(q.dtype), v.to(q.dtype)
        scores = _scores(q, k, seen, scale, softcap, CAPPED, PRECISION)
        if SCORED:
            at = heads[:, None] * width + entries[None, :]
            tl.store(logits + at, scores, mask=(heads < G)[:, None] & seen[None, :] & scored)
        peak, total, acc = _add(peak, total, acc, scores, v, PRECISION)

    if GROUPED:
        own_keys = table.pointer(facts, count, row, layer, table.UNCOMPRESSED_KEYS, TYPE, ALIGNED)
        own_values = table.pointer(facts, count, row, layer, table.UNCOMPRESSED_VALUES, TYPE, ALIGNED)
        front = table.number(facts, count, row, table.FRONT)
        mine = tl.where(split == splits - 1, uncompressed, 0).to(tl.int32)
        for start in tl.range(0, mine, UNCOMPRESSED_BLOCK):
            entries = start + tl.arange(0, UNCOMPRESSED_BLOCK)
            seen = (entries < uncompressed) & waits(numbers, count, row, entries, front)
            if WINDOWED:
                known = seen & (window > 0)
                seen &= (window == 0) | (tl.load(ages + capacity + entries, mask=known, other=0) > oldest)
            k = load_rows(own_keys, entries, seen, D, HEAD_DIM).to(q.dtype)
            if REBASED:
                turned = rotated(
                    own_keys, entries, seen & (entries < front), numbers, count, row, inv_freq, D, HEAD_DIM
                )
                turns = (entries < front) & (table.number(facts, count, row, table.REBASED) != 0)
                k = tl.where(turns[:, None], turned.to(q.dtype), k)
            v = load_rows(own_values, entries, seen, D, HEAD_DIM).to(q.dtype)
            scores = _scores(q, k, seen, scale, softcap, CAPPED, PRECISION)
            if SCORED:
                at = heads[:, None] * width + capacity + entries[None, :]
                tl.store(logits + at, scores, mask=(heads < G)[:, None] & seen[None, :] & scored)
            peak, total, acc = _add(peak, total, acc, scores, v, PRECISION)

    if WHOLE:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # of a row that sees nothing: 0
        at = place * G * HEAD_DIM + heads[:, None] * HEAD_DIM + channels[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_tile)
    else:
        at = program * G * HEAD_DIM + heads[:, None] * HEAD_DIM + channels[None, :]
        tl.store(partials + at, acc, mask=in_tile)
    if SCORED or not WHOLE:
        tl.store(peaks + program * G + heads, peak, mask=heads < G)
        tl.store(totals + program * G + heads, total, mask=heads < G)


@triton.jit
def waits(numbers, count, row, entries, front):
    """Return which entries of front and tail are in use."""
    tail_start = table.number(numbers, count, row, table.TAIL_START)
    tail_limit = table.number(numbers, count, row, table.TAIL_LIMIT)
    waiting = table.number(numbers, count, row, table.WAITING)
    tail = entries - front
    since = (tail - tail_start + tail_limit) % tl.maximum(tail_limit, 1)
    in_tail = (tail >= 0) & (tail < tail_limit) & (since < waiting)
    return in_tail | (entries < tl.minimum(front, table.number(numbers, count, row, table.IN_FRONT)))


@triton.jit
def rotated(keys, entries, seen, numbers, count, row, inv_freq, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load keys [BLOCK, D] rotated on by the row's positions (rotary embedding, halves convention), in float32."""
    HALF: tl.constexpr = HEAD_DIM // 2
    channels = tl.arange(0, D)
    positions = table.number(numbers, count, row, table.REROTATED).to(tl.float64)
    angles = positions * tl.load(inv_freq + channels % HALF, mask=channels < HEAD_DIM, other=0.0)
    inside = seen[:, None] & (channels < HEAD_DIM)[None, :]
    at = entries[:, None] * HEAD_DIM
    own = tl.load(keys + at + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(keys + at + ((channels + HALF) % HEAD_DIM)[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.where((channels < HALF)[None, :], -other, other)
    return own * tl.cos(angles).to(tl.float32)[None, :] + other * tl.sin(angles).to(tl.float32)[None, :]


@triton.jit
def _scores(q, k, seen, scale, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Compute logits float32 [M, BLOCK]: products are exact and summed in float32 before they are scaled."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAPPED:  # within +-softcap, both in powers of two
        power = tl.exp(-2.0 * tl.abs(scores / softcap))
        scores = tl.where(scores < 0, -softcap, softcap) * (1.0 - power) / (1.0 + power)
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
    partials, peaks, totals, rows, places, first_splits, sinks, rotation, out,
    KV_HEADS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a query head to its output: grid (n, G).

    sinks [q_heads]: logits without a value; ROTATED: the result leaves the basis of `rotation` [d, d].
    """
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + index)
    channels = tl.arange(0, D)
    if tl.load(rows + index) < 0:
        at = out + (place * G + head) * HEAD_DIM + channels
        tl.store(at, tl.zeros([D], out.dtype.element_ty), mask=channels < HEAD_DIM)
        return
    first, last = tl.load(first_splits + index), tl.load(first_splits + index + 1)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if SINKS:
        highest = tl.load(sinks + place % KV_HEADS * G + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([D], tl.float32)
    for start in tl.range(first, last, S):
        split = start + tl.arange(0, S)
        inside = split < last
        peak = tl.load(peaks + split * G + head, mask=inside, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(peak, 0))
        weight, shrink = tl.exp2(peak - _base(higher)), tl.exp2(highest - _base(higher))
        total = total * shrink + tl.sum(tl.load(totals + split * G + head, mask=inside, other=0.0) * weight, 0)
        at = (split * G + head)[:, None] * HEAD_DIM + channels[None, :]
        values = tl.load(partials + at, mask=inside[:, None] & (channels < HEAD_DIM)[None, :], other=0.0)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        highest = higher
    result = acc / tl.where(total == 0.0, 1.0, total)
    if ROTATED:
        inputs = tl.arange(0, D)
        in_matrix = (inputs < HEAD_DIM)[:, None] & (channels < HEAD_DIM)[None, :]
        matrix = tl.load(rotation + channels[None, :] + inputs[:, None] * HEAD_DIM, mask=in_matrix, other=0.0)
        result = tl.sum(matrix * result[None, :], 1)  # times the transposed rotation
    tl.store(out + (place * G + head) * HEAD_DIM + channels, result.to(out.dtype.element_ty), mask=channels < HEAD_DIM)


@triton.jit(do_not_specialize=["count", "layer"])
def sum_received(
    logits, logits_at, peaks, totals, sinks,
    facts, numbers, count, rows, places, layer, first_splits,
    KV_HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    GROUPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Sum the attention that each entry received over all query heads of the group: grid (n, blocks of entries)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    if row < 0:
        return
    if table.number(facts, count, row, table.SCORED) == 0:
        return
    capacity = table.number(facts, count, row, table.CAPACITY)
    width = capacity + table.number(facts, count, row, table.UNCOMPRESSED)
    start = tl.program_id(1) * BLOCK
    if start >= width:
        return
    entries = start + tl.arange(0, BLOCK)
    seen = entries < tl.minimum(table.number(numbers, count, row, table.PACKED), capacity)
    if GROUPED:
        front = table.number(facts, count, row, table.FRONT)
        behind = (entries >= capacity) & (entries < width)
        seen |= behind & waits(numbers, count, row, entries - capacity, front)
    if WINDOWED:
        window = table.number(facts, count, row, table.WINDOW)
        ages = table.pointer(facts, count, row, layer, table.AGES, tl.int32, False)
        known = seen & (window > 0)
        oldest = table.number(numbers, count, row, table.AGE) - window
        seen &= (window == 0) | (tl.load(ages + entries, mask=known, other=0) > oldest)
    fresh = tl.zeros([BLOCK], tl.float32)
    alike = table.number(facts, count, row, table.ALIKE) != 0
    place = tl.load(places + index)
    begin = tl.where(alike, index - place % KV_HEADS, index)  # the heads of a sequence are neighbours
    for other in tl.range(begin, begin + tl.where(alike, KV_HEADS, 1)):
        fresh += _received(
            logits, logits_at, peaks, totals, sinks, first_splits, places, other, entries, seen, width,
            KV_HEADS, G, M, S, SINKS,
        )  # fmt: skip
    scores = table.pointer(facts, count, row, layer, table.SCORES, tl.float32, False) + entries
    replaced = table.number(facts, count, row, table.REPLACED) != 0
    inside = entries < width
    old = tl.load(scores, mask=inside & (replaced == 0), other=0.0)
    tl.store(scores, old + fresh, mask=inside)


@triton.jit
def _received(
    logits, logits_at, peaks, totals, sinks, first_splits, places, index, entries, seen, width,
    KV_HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, S: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Return what entries received from the query heads of a row."""
    heads = tl.arange(0, M)
    first = tl.load(first_splits + index)
    split = first + tl.arange(0, S)
    inside = (heads < G)[:, None] & (split < tl.load(first_splits + index + 1))[None, :]
    at = split[None, :] * G + heads[:, None]
    peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
    highest = tl.max(peak, 1)
    if SINKS:
        mine = sinks + tl.load(places + index) % KV_HEADS * G + heads
        sink = tl.load(mine, mask=heads < G, other=float("-inf")).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(totals + at, mask=inside, other=0.0) * tl.exp2(peak - base[:, None]), 1)
    if SINKS:
        total += tl.exp2(sink - base)
    shown = (heads < G)[:, None] & seen[None, :]
    own = logits + tl.load(logits_at + index) * G
    scores = tl.load(own + heads[:, None] * width + entries[None, :], mask=shown, other=float("-inf"))
    shares = tl.exp2(scores - base[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
    return tl.sum(tl.where(shown, shares, 0.0), 0)


@triton.jit
def _base(peak):
    return tl.where(peak == float("-inf"), 0.0, peak)

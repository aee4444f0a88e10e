"""What a decode step writes before it attends: the new token of every row, where its decode rule puts it."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots import rows as row_table
from warmkv.replicas.slots.kernels import table
from warmkv.replicas.slots.kernels.decode import rotated

EVICTED_LAST = tl.constexpr(row_table.EVICTED_LAST)

_STRIDES = [f"{of}_{each}" for of in ("query", "key", "value") for each in ("sequence", "head")]


@triton.jit(do_not_specialize=[*_STRIDES, "count", "layer", "repeats", "counted"])
def put(
    query, query_sequence, query_head, key, key_sequence, key_head, value, value_sequence, value_head,
    facts, numbers, count, rows, places, layer,
    places_taken, repeats, counted,
    levels, rotation, inv_freq, turned_query,
    PUT: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr, FIRST: tl.constexpr, OTHERS: tl.constexpr,
    ALIGNED: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, EVICTS: tl.constexpr, AGED: tl.constexpr, SEGMENTED: tl.constexpr, REBASED: tl.constexpr,
    GROUPED: tl.constexpr, ROTATED: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Put the new token of each row in its place: grid (n,). Where it goes is left in `places_taken` [count].

    `repeats`: the step failed after this was done, and the places are those of `places_taken`; `counted`: what entries
    received was counted, too. ROTATED: `turned_query` [places, G, d] takes the queries times `rotation` [d, d].
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    if row < 0:
        return
    place = tl.load(places + index)
    channels = tl.arange(0, D)
    inside = channels < HEAD_DIM
    sequence, head = place // KV_HEADS, place % KV_HEADS
    k = tl.load(key + sequence * key_sequence + head * key_head + channels, mask=inside, other=0.0)
    v = tl.load(value + sequence * value_sequence + head * value_head + channels, mask=inside, other=0.0)
    entry = table.number(numbers, count, row, table.ENTRY)
    if EVICTS:
        evicts = (table.number(numbers, count, row, table.EVICTS) != 0) & (repeats == 0)
        if evicts:
            entry = _least(facts, numbers, count, row, layer, BLOCK)
    if repeats != 0:
        entry = tl.load(places_taken + row)
    tl.store(places_taken + row, entry)

    if GROUPED:
        own_keys = table.pointer(facts, count, row, layer, table.UNCOMPRESSED_KEYS, TYPE, ALIGNED)
        own_values = table.pointer(facts, count, row, layer, table.UNCOMPRESSED_VALUES, TYPE, ALIGNED)
        tl.store(own_keys + entry * HEAD_DIM + channels, k.to(TYPE), mask=inside)
        tl.store(own_values + entry * HEAD_DIM + channels, v.to(TYPE), mask=inside)
    else:
        keys = table.pointer(facts, count, row, layer, table.KEYS, FIRST, ALIGNED)
        keys_second = table.pointer(facts, count, row, layer, table.KEYS_SECOND, OTHERS, ALIGNED)
        values = table.pointer(facts, count, row, layer, table.VALUES, FIRST, ALIGNED)
        values_second = table.pointer(facts, count, row, layer, table.VALUES_SECOND, OTHERS, ALIGNED)
        if PAGE_SIZE > 0:
            in_pages = table.number(facts, count, row, table.PAGE_SIZE) != 0
            base, further = table.location(facts, count, row, layer, table.KEYS)
            address = table.number(numbers, count, row, table.PAGE_KEYS)
            keys = table.enter_page(facts, base, further, in_pages, entry // PAGE_SIZE, address, FIRST, ALIGNED)
            base, further = table.location(facts, count, row, layer, table.VALUES)
            address = table.number(numbers, count, row, table.PAGE_VALUES)
            values = table.enter_page(facts, base, further, in_pages, entry // PAGE_SIZE, address, FIRST, ALIGNED)
            entry = tl.where(in_pages, entry % PAGE_SIZE, entry)
        sinks = tl.zeros([], tl.int64)
        if REBASED:
            rebased = table.number(facts, count, row, table.REBASED) != 0
            sinks = tl.where(rebased, table.number(facts, count, row, table.SINKS), 0)
        PUT(keys, keys_second, entry, k, entry >= sinks, levels, rotation, BITS, D, HEAD_DIM)
        PUT(values, values_second, entry, v, True, levels, rotation, BITS, D, HEAD_DIM)
        if REBASED:
            cached = table.pointer(facts, count, row, layer, table.SINK_KEYS, TYPE, ALIGNED)
            tl.store(cached + entry * HEAD_DIM + channels, k.to(TYPE), mask=inside & (entry < sinks))
            tl.debug_barrier()
            for sink in tl.range(0, sinks):
                at = sink + tl.zeros([1], tl.int64)
                turned = rotated(cached, at, at >= 0, numbers, count, row, inv_freq, D, HEAD_DIM)
                turned = tl.sum(turned, 0).to(TYPE)
                PUT(keys, keys_second, sink, turned, True, levels, rotation, BITS, D, HEAD_DIM)

    if AGED:
        uncompressed = table.number(facts, count, row, table.CAPACITY) if GROUPED else 0
        if counted == 0:
            ages = table.pointer(facts, count, row, layer, table.AGES, tl.int32, False)
            aged = table.number(facts, count, row, table.AGED) != 0
            age = table.number(numbers, count, row, table.AGE).to(tl.int32)
            tl.store(ages + uncompressed + entry, age, mask=aged)
            scores = table.pointer(facts, count, row, layer, table.SCORES, tl.float32, False)
            tl.store(scores + uncompressed + entry, 0.0, mask=table.number(facts, count, row, table.SCORED) != 0)
    if SEGMENTED:
        size = table.number(facts, count, row, table.SEGMENT)
        if size > 0:
            segment, within = entry // size, inside & (entry % size != 0)
            bounds = segment * HEAD_DIM + channels
            lowest = table.pointer(facts, count, row, layer, table.LOWEST, TYPE, ALIGNED) + bounds
            highest = table.pointer(facts, count, row, layer, table.HIGHEST, TYPE, ALIGNED) + bounds
            number = k.to(tl.float32)
            least = tl.load(lowest, mask=within, other=float("inf")).to(tl.float32)
            most = tl.load(highest, mask=within, other=float("-inf")).to(tl.float32)
            tl.store(lowest, tl.minimum(number, least).to(TYPE), mask=inside)
            tl.store(highest, tl.maximum(number, most).to(TYPE), mask=inside)
    if ROTATED:
        inputs = tl.arange(0, D)
        in_matrix = (inputs < HEAD_DIM)[:, None] & inside[None, :]
        matrix = tl.load(rotation + inputs[:, None] * HEAD_DIM + channels[None, :], mask=in_matrix, other=0.0)
        query += sequence * query_sequence + head * G * query_head
        for one in tl.static_range(G):
            q = tl.load(query + one * query_head + inputs, mask=inputs < HEAD_DIM, other=0.0)
            turned = tl.sum(q.to(tl.float32)[:, None] * matrix, 0)
            tl.store(turned_query + (place * G + one) * HEAD_DIM + channels, turned, mask=inside)


@triton.jit
def _least(facts, numbers, count, row, layer, BLOCK: tl.constexpr):
    """Return the entry with the lowest score, NaN first, recent and protected ones last; of equals the oldest."""
    scores = table.pointer(facts, count, row, layer, table.SCORES, tl.float32, False)
    ages = table.pointer(facts, count, row, layer, table.AGES, tl.int32, False)
    in_use = table.number(numbers, count, row, table.BEFORE).to(tl.int32)
    oldest = table.number(numbers, count, row, table.OLDEST)
    early = table.number(numbers, count, row, table.EARLY)
    window = table.number(facts, count, row, table.WINDOW)
    # The age up to which nothing sees entries.
    unseen = tl.where(window > 0, table.number(numbers, count, row, table.AGE) - window, -1)
    least = tl.full([], float("inf"), tl.float32)
    for start in tl.range(0, in_use, BLOCK):
        _, score = _scored(scores, ages, start, in_use, oldest, early, unseen, BLOCK)
        least = tl.minimum(least, tl.min(score, 0))
    found = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)  # age and entry in one number
    for start in tl.range(0, in_use, BLOCK):
        age, score = _scored(scores, ages, start, in_use, oldest, early, unseen, BLOCK)
        entries = start + tl.arange(0, BLOCK)
        both = (age.to(tl.int64) << 32) | entries
        both = tl.where((score <= least) & (entries < in_use), both, 0x7FFFFFFFFFFFFFFF)
        found = tl.minimum(found, tl.min(both, 0))
    return tl.minimum(found & 0xFFFFFFFF, in_use - 1)  # never behind the row, whatever its scores are


@triton.jit
def _scored(scores, ages, start, in_use, oldest, early, unseen, BLOCK: tl.constexpr):
    entries = start + tl.arange(0, BLOCK)
    used = entries < in_use
    age = tl.load(ages + entries, mask=used, other=0)
    score = tl.load(scores + entries, mask=used, other=float("inf"))
    score = tl.where(used & ((age > oldest) | (age < early)), score + EVICTED_LAST, score)
    # NaN compares with nothing: no entry would be found.
    return age, tl.where((used & (age <= unseen)) | (score != score), float("-inf"), score)

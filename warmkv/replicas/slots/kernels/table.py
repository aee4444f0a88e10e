"""Reading the tables of `row_tables.py` in a kernel: its names are the numbers of their lines."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots.row_facts import FACTS, PARTS
from warmkv.replicas.slots.row_tables import NUMBERS

_COUNT = tl.constexpr(len(PARTS))
(
    KEYS, KEYS_SECOND, KEYS_THIRD, VALUES, VALUES_SECOND, VALUES_THIRD,
    UNCOMPRESSED_KEYS, UNCOMPRESSED_VALUES, SINK_KEYS, SCORES, AGES, LOWEST, HIGHEST,
) = map(tl.constexpr, range(len(PARTS)))  # fmt: skip
(
    FIRST_LAYER, CAPACITY, FRONT, UNCOMPRESSED, SINKS, SEGMENT, WINDOW, SCORED, REPLACED, ALIKE, AGED, REBASED,
    PAGE_SIZE, LAYERS, STORAGE,
) = map(tl.constexpr, range(2 * len(PARTS), 2 * len(PARTS) + len(FACTS)))  # fmt: skip
(
    ENTRY, BEFORE, PACKED, AGE, OLDEST, EARLY, REROTATED, READ_LIMIT, CHANNELS, EVICTS,
    IN_FRONT, TAIL_START, TAIL_LIMIT, WAITING, PAGE_KEYS, PAGE_VALUES,
) = map(tl.constexpr, range(len(NUMBERS)))  # fmt: skip


@triton.jit
def number(table, count, row, COLUMN: tl.constexpr):
    """Load a number of a row from a table of `count` rows."""
    return tl.load(table + COLUMN * count + row)


@triton.jit
def strides(sequence, head, HEAD_DIM: tl.constexpr):
    """Return strides of queries, with what the compiler may know of them."""
    if HEAD_DIM % 16 == 0:
        sequence, head = tl.multiple_of(sequence, 16), tl.multiple_of(head, 16)
    return sequence, head


@triton.jit
def location(facts, count, row, layer, PART: tl.constexpr):
    """Return where a part of a row lies, or the list of its pages, and how many bytes further a layer begins."""
    stride = tl.load(facts + (_COUNT + PART) * count + row)
    return tl.load(facts + PART * count + row), (layer - number(facts, count, row, FIRST_LAYER)) * stride


@triton.jit
def pointer(facts, count, row, layer, PART: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to a part of a row in a layer."""
    base, further = location(facts, count, row, layer, PART)
    return _pointer(facts, base + further, TYPE, ALIGNED)


@triton.jit
def page_address(base, listed, page):
    """Return where one of the pages of a row lies, that is the row itself where none is listed; base of `location`."""
    address = tl.load(base.to(tl.pointer_type(tl.int64)) + page, mask=listed, other=0)
    return tl.where(listed, address, base)


@triton.jit
def page_pointer(facts, address, further, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to what lies there of a layer."""
    return _pointer(facts, address + further, TYPE, ALIGNED)


@triton.jit
def enter_page(facts, base, further, in_pages, page, address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """List the address of a page of a row and return the pointer to it, to the row itself where that is in no pages.

    base, further: as of `location`.
    """
    tl.store(base.to(tl.pointer_type(tl.int64)) + page, address, mask=in_pages)
    return _pointer(facts, tl.where(in_pages, address, base) + further, TYPE, ALIGNED)


@triton.jit
def _pointer(facts, address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to an address, by how far it is from the table: of one that is made of a number Triton does
    not know where it points to, and loads nothing ahead.
    """
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    further = address - facts.to(tl.int64)
    if ALIGNED:
        further = tl.multiple_of(further, 16)
    if SIZE > 1:
        further = further // SIZE
        if ALIGNED:
            further = tl.multiple_of(further, 16 // SIZE)
    return facts.to(tl.pointer_type(TYPE)) + further

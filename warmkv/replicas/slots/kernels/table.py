"""Reading the tables of `row_tables.py` in a kernel: its names are the numbers of their lines."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from warmkv.replicas.slots.row_tables import FACTS, NUMBERS, PARTS

_COUNT = tl.constexpr(len(PARTS))
(
    KEYS, KEYS_SECOND, KEYS_THIRD, VALUES, VALUES_SECOND, VALUES_THIRD,
    UNCOMPRESSED_KEYS, UNCOMPRESSED_VALUES, SINK_KEYS, SCORES, AGES, LOWEST, HIGHEST,
) = map(tl.constexpr, range(len(PARTS)))  # fmt: skip
(
    FIRST_LAYER, CAPACITY, FRONT, UNCOMPRESSED, SINKS, PAGE, WINDOW, SCORED, REPLACED, ALIKE, AGED, REBASED,
) = map(tl.constexpr, range(2 * len(PARTS), 2 * len(PARTS) + len(FACTS)))  # fmt: skip
(
    ENTRY, BEFORE, PACKED, AGE, OLDEST, EARLY, REROTATED, READS, CHANNELS, EVICTS,
    IN_FRONT, TAIL_START, TAIL_LIMIT, WAITING,
) = map(tl.constexpr, range(len(NUMBERS)))  # fmt: skip


@triton.jit
def number(table, count, row, COLUMN: tl.constexpr):
    """Load a number of a row from a table of `count` rows."""
    return tl.load(table + COLUMN * count + row)


@triton.jit
def pointer(facts, count, row, layer, PART: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to a part of a row in a layer."""
    base = tl.load(facts + PART * count + row)
    stride = tl.load(facts + (_COUNT + PART) * count + row)
    address = base + (layer - number(facts, count, row, FIRST_LAYER)) * stride
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(TYPE))

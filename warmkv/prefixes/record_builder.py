"""Put records into columns, many at a time: lines of the access log in any form, or records that are there as objects.

The values of a line's JSON go into the columns as they are, and what a record must be is checked for thousands of lines
at once; lines in the form that the gateway writes are read faster by `record_text.py`. Lines among which something is
wrong are halved until it is found; that line alone is read as a record, which gives the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.hashing import DIGEST_BYTES
from warmkv.prefixes.packed_keys import GROWTH, KeyTable, packed
from warmkv.prefixes.record import DEFAULTS, KINDS, VERSION, RecordError, RequestRecord
from warmkv.prefixes.record_chunk import LISTS, TYPES, Chunk, UnusualError, check, loads
from warmkv.prefixes.record_columns import (
    NAMES,
    NUMBERS,
    PARTS,
    TEXTS,
    USAGE,
    Ints,
    Parts,
    RecordColumns,
    Smalls,
    Texts,
)

LARGEST = 2**31 - 1  # of a count, as columns hold it
FEW = 8  # lines that are read one by one
MANY = 4096  # records that are put into columns at a time
PLAIN = (*NUMBERS, *NAMES, *TEXTS)

_values_of_line = itemgetter("v", *PLAIN, *LISTS, "usage")
_plain_of_record = attrgetter(*PLAIN, *LISTS)
_usage_of_line = itemgetter("input", "read", "output", "written")
_usage_of_record = attrgetter("input", "read", "output", "written")


def chunks_of(texts: Sequence[str], refuse: Callable[[int, str], None]) -> Iterator[tuple[int, Chunk]]:
    """Read lines of the access log; yield each chunk with the number of its first line, in their order.

    Lines that are no records are refused with their number and the reason.
    """
    try:
        yield 0, _chunk_of_lines(texts)
        return
    except UnusualError:
        pass
    if len(texts) > FEW:
        middle = len(texts) // 2
        yield from chunks_of(texts[:middle], refuse)
        for first, chunk in chunks_of(texts[middle:], lambda number, reason: refuse(middle + number, reason)):
            yield middle + first, chunk
        return
    for number, text in enumerate(texts):
        try:
            yield number, chunk_of([RequestRecord.from_json(text)])
        except RecordError as error:
            refuse(number, str(error))


def chunk_of(records: Sequence[RequestRecord]) -> Chunk:
    """Put records into a chunk. Raises RecordError where a count is larger than columns hold."""
    odd: dict[bytes, bytes] = {}

    def packed_keys(keys: Sequence[bytes]) -> bytes:
        joined = b"".join(keys)
        if len(joined) == DIGEST_BYTES * len(keys) and set(map(len, keys)) <= {DIGEST_BYTES}:
            return joined
        return b"".join([key if len(key) == DIGEST_BYTES else _stand_in(key, odd) for key in keys])

    rows = [(*_plain_of_record(record), _usage_of_record(record.usage)) for record in records]
    try:
        chunk = _chunk(rows, packed_keys)
    except OverflowError:
        raise RecordError(f"bad record: counts must be below {LARGEST + 1:,}") from None
    return replace(chunk, odd=odd)


def _stand_in(key: bytes, odd: dict[bytes, bytes]) -> bytes:
    """Return a key of the usual length for another one."""
    name = hashlib.blake2b(key, digest_size=DIGEST_BYTES, person=b"odd key").digest()
    odd[name] = key
    return name


def _chunk_of_lines(texts: Sequence[str]) -> Chunk:
    """Read lines. Raises UnusualError where it is not sure that all are records."""
    try:
        rows = [_row(line) for line in map(loads, texts)]
        chunk = _chunk(rows, _packed_hex, checked=True)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UnusualError from error
    check(chunk)
    return chunk


def _row(line: Any) -> tuple[Any, ...]:
    """Return the values of a line. Raises KeyError or TypeError where it is none."""
    try:
        version, *values, usage = _values_of_line(line)
    except KeyError:
        version, *values, usage = _values_of_line({**DEFAULTS, **line})
    if version != VERSION or len(usage) != len(USAGE) + 1:
        raise UnusualError
    return (*values, _usage_of_line(usage))


def _packed_hex(keys: Sequence[str]) -> bytes:
    """Return keys of the usual length. Raises UnusualError for others."""
    joined = bytes.fromhex("".join(keys))  # which skips blanks
    if len(joined) != DIGEST_BYTES * len(keys) or not set(map(len, keys)) <= {2 * DIGEST_BYTES}:
        raise UnusualError
    return joined


def _chunk(rows: Sequence[tuple[Any, ...]], pack: Callable[[Sequence[Any]], bytes], *, checked: bool = False) -> Chunk:
    """Turn rows into columns; where `checked`, raise UnusualError for types that a record does not have."""

    def of(name: str, kinds: Collection[type], column: Sequence[Any]) -> Sequence[Any]:
        if checked and not set(map(type, column)) <= set(kinds):
            raise UnusualError(name)
        return column

    *plain, hashes, generated, marks, reads, usage = _transposed(rows, len(PLAIN) + len(LISTS) + 1)
    numbers, words = {}, {}
    for name, column in zip(PLAIN, plain, strict=True):
        of(name, KINDS[name], column)
        if name in NUMBERS:
            numbers[name] = np.array(column, dtype=TYPES[name])
        else:
            words[name] = column
    *usages, written = _transposed(usage, len(USAGE) + 1)
    for name, column in zip(USAGE, usages, strict=True):
        numbers[name] = np.array(of(name, (int,), column), dtype=np.int32)
    for name, lists in zip(LISTS, (hashes, generated, marks, reads), strict=True):
        of(name, (list,), lists)
    of("written", (dict,), written)
    counts = {
        name: np.fromiter(map(len, lists), np.int32, len(rows))
        for name, lists in zip(PARTS, (hashes, generated, marks, reads, written), strict=True)
    }
    words["written"] = list(chain.from_iterable(written))
    tokens = of("written", (int,), list(chain.from_iterable([each.values() for each in written if each])))
    positions, words["marks"], mark_keys = _transposed(list(chain.from_iterable(marks)), 3)
    places, read_keys = _transposed(list(chain.from_iterable(reads)), 2)
    parts = {
        "written": np.array(tokens, dtype=np.int32),
        "marks": np.array(of("marks", (int,), positions), dtype=np.int32),
        "reads": np.array(of("reads", (int,), places), dtype=np.int32),
    }
    of("marks", (str,), words["marks"])
    keys = pack([*chain.from_iterable(hashes), *chain.from_iterable(generated), *mark_keys, *read_keys])
    return Chunk(numbers, words, counts, parts, packed(keys))


def _transposed(rows: Sequence[Sequence[Any]], width: int) -> Sequence[Sequence[Any]]:
    """Return the columns of rows, all of that width. Raises ValueError for other ones."""
    return list(zip(*rows, strict=True)) if rows else [()] * width


class Builder:
    """Collect chunks, numbering their names and keys."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._names: dict[str, int] = {}
        self._odd: dict[bytes, bytes] = {}
        self._columns: dict[str, _Column] = {}
        self._texts: dict[str, list[str]] = {name: [] for name in TEXTS}

    def add(self, chunk: Chunk) -> None:
        """Add the records of a chunk."""
        for name, column in chunk.numbers.items():
            self._extend(name, column)
        for name, words in chunk.words.items():
            if name in TEXTS:
                self._extend(name, np.fromiter(map(len, words), np.int32, len(words)))
                self._texts[name].append("".join(words))
            else:
                self._extend(f"{name}.name" if name in PARTS else name, self._numbered(words))
        numbers, at = self._table.number(chunk.keys), 0
        for name in LISTS:
            count = int(chunk.counts[name].sum())
            self._extend(f"{name}.key", numbers[at : at + count])
            at += count
        for name, values in chunk.parts.items():
            self._extend(f"{name}.value", values)
        for name, counts in chunk.counts.items():
            self._extend(name, counts)
        self._odd |= chunk.odd

    def _extend(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._columns:
            self._columns[name] = _Column(values.dtype)
        self._columns[name].extend(values)

    def extend(self, records: Sequence[RequestRecord]) -> None:
        """Add records. Raises RecordError where a count is larger than columns hold."""
        for first in range(0, len(records), MANY):
            self.add(chunk_of(records[first : first + MANY]))

    def _numbered(self, words: Sequence[str]) -> Smalls:
        known = self._names
        if len(words) and words.count(words[0]) == len(words):
            return np.full(len(words), known.setdefault(words[0], len(known)), dtype=np.int32)
        try:
            return np.fromiter(map(known.__getitem__, words), np.int32, len(words))
        except KeyError:  # of a name that is new
            for word in dict.fromkeys(words):
                known.setdefault(word, len(known))
        return np.fromiter(map(known.__getitem__, words), np.int32, len(words))

    def build(self) -> RecordColumns:
        """Return all records that were added. It is the end of the builder."""
        if not self._columns:
            self.add(chunk_of([]))
        names, keys, odd = list(self._names), self._table.close(), self._odd
        columns: dict[str, Any] = {name: column.close() for name, column in self._columns.items()}
        texts = {name: Texts("".join(self._texts[name]), *_bounds(columns[name])) for name in TEXTS}
        parts = {
            "hashes": ("hashes.key",),
            "generated": ("generated.key",),
            "marks": ("marks.value", "marks.name", "marks.key"),
            "reads": ("reads.value", "reads.key"),
            "written": ("written.name", "written.value"),
        }
        several = {
            name: Parts(*_bounds(columns[name]), tuple(columns[value] for value in values))
            for name, values in parts.items()
        }
        plain = {name: columns[name] for name in (*NUMBERS, *NAMES, *USAGE)}
        return RecordColumns(names=names, keys=keys, odd_keys=odd, **(plain | texts | several))


class _Column:
    """Grow a column in its place: many short arrays would leave holes in the memory that they had."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._values: NDArray[Any] = np.empty(0, dtype)
        self._count = 0

    def extend(self, values: NDArray[Any]) -> None:
        """Append values."""
        before, self._count = self._count, self._count + len(values)
        if self._count > len(self._values):
            self._values.resize(int(self._count * GROWTH), refcheck=False)
        self._values[before : self._count] = values

    def close(self) -> NDArray[Any]:
        """Return all values. It is the end of the column."""
        self._values.resize(self._count, refcheck=False)
        return self._values


def _bounds(counts: Smalls) -> tuple[Ints, Smalls]:
    """Return where the parts of each begin, and their counts."""
    ends: Ints = counts.cumsum(dtype=np.int64)
    return ends - counts, counts


def columns_of(records: Sequence[RequestRecord]) -> RecordColumns:
    """Return records as columns. Raises RecordError where a count is larger than columns hold."""
    if isinstance(records, RecordColumns):
        return records
    builder = Builder()
    builder.extend(records)
    return builder.build()

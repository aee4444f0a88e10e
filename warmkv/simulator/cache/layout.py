"""The prompts of a replay as paths of a prefix tree that all replicas, and all points of a sweep, share.

A run ends where prompts end or part, and at breakpoints. So nodes are split only where blocks of one run have
different lives.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.packed_keys import ranks
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import columns_of
from warmkv.prefixes.record_columns import Parts, RecordColumns

Hashes = Sequence[bytes]
Ints = NDArray[np.int64]
Numbers = NDArray[np.integer[Any]]
Runs = tuple[int, ...]
NONE = -1


class Write(NamedTuple):
    """A breakpoint: behind so many runs of its prompt, and the number of its tail; NONE if it ends with a block.

    `number` is that of the tail or run that ends at its position.
    """

    position: int
    runs: int
    tail: int
    number: int


class Read(NamedTuple):
    """A position at which an earlier breakpoint may be read: leading full blocks, and the node that ends there."""

    position: int
    blocks: int
    number: int
    is_tail: bool


@dataclass(slots=True, eq=False)
class Prompt:
    """The full blocks of a prompt as runs, its breakpoints, and those that it may read, highest first."""

    tenant: str
    tokens: int
    block_size: int
    runs: Runs
    writes: tuple[Write, ...] = ()
    reads: tuple[Read, ...] = ()


class Run(NamedTuple):
    """A run by its number: the one before it (NONE at a beginning), its blocks, and the tokens of each."""

    parent: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All prompts, and all runs and tails by number, with a prompt and its blocks that each ends with."""

    records: RecordColumns
    prompts: Sequence[Prompt]
    runs: Sequence[Run]
    examples: Ints  # [runs, 2]: number of a prompt, and its leading blocks up to the end of the run
    tails: Sequence[bytes]  # keys; tails are numbered behind the runs

    def keys(self, number: int) -> Hashes:
        """Return the keys of a run's blocks."""
        if number >= len(self.examples):
            return (self.tails[number - len(self.examples)],)
        prompt, end = map(int, self.examples[number])
        (hashes,) = self.records.hashes.of(prompt)
        return tuple(self.records.keys_of(hashes[end - self.runs[number].blocks : end]))

    def path(self, number: int) -> list[int]:
        """Return the runs from the first one of a prompt to a run or tail."""
        found = [number]
        while (parent := self.runs[found[-1]].parent) != NONE:
            found.append(parent)
        return found[::-1]

    def places(self, wanted: Container[bytes] | None = None) -> dict[bytes, tuple[int, int]]:
        """Return the run of each block or tail, or of those that are wanted, and its place there, by its key."""
        return {
            key: (number, at)
            for number in range(len(self.runs))
            for at, key in enumerate(self.keys(number))
            if wanted is None or key in wanted
        }


def layout(records: Sequence[RequestRecord], blocks: Numbers | None = None) -> Layout:
    """Lay out prompts as the longest runs that no prompt ends in or leaves.

    `blocks` stand for the blocks of all prompts, one after the other, as small numbers from 0 on.
    """
    columns = columns_of(records)
    (hashes,) = columns.hashes.flat()
    counts = columns.hashes.counts.astype(np.int64)
    if blocks is None:
        blocks = ranks(hashes)
    starts = counts.cumsum() - counts
    some = counts > 0
    inner = starts[some]
    if not _chained(blocks, inner):
        blocks = _by_prefix(blocks, counts)
    parent = _parents(blocks, inner)
    known = np.zeros(len(parent), dtype=bool)
    known[blocks] = True
    last = np.bincount(parent[known] + 1, minlength=len(parent) + 1)[1:] > 1  # blocks behind which prompts part
    last[blocks[inner + counts[some] - 1]] = True  # or end
    marks, reads = _Positions.of(columns, "marks", starts), _Positions.of(columns, "reads", starts)
    last[blocks[marks.place[marks.full > 0]]] = True
    number = last.cumsum() - 1  # of runs, by their last block

    places = np.flatnonzero(last[blocks])
    runs = number[blocks[places]]
    owners = np.searchsorted(inner, places, side="right") - 1
    owners = np.flatnonzero(some)[owners]
    amounts = np.bincount(owners, minlength=len(columns))  # runs of each prompt
    firsts = amounts.cumsum() - amounts
    inner_firsts = firsts[some]
    begins = _before(places, inner_firsts) + 1
    begins[inner_firsts] = inner
    total = int(last.sum())
    lengths, parents, example, until = np.zeros((4, total), dtype=np.int64)
    lengths[runs], parents[runs] = places + 1 - begins, _before(runs, inner_firsts)
    example[runs], until[runs] = owners, places + 1 - starts[owners]

    def run_before(positions: _Positions) -> Ints:
        """Return the run that ends with the last full block before each position."""
        found = np.full(len(positions.place), NONE)
        found[positions.full > 0] = number[blocks[positions.place[positions.full > 0]]]
        return found

    before = run_before(marks)
    tails = _Tails.of(before, marks, len(columns.keys), total)
    runs_until = np.searchsorted(places, marks.place, side="right") - firsts[marks.owner]
    written = np.zeros(total + len(tails.parents), dtype=bool)
    ended = np.where(marks.rest > 0, tails.numbers, before)  # the runs and tails that end at marks
    written[ended] = True

    before, inside = run_before(reads), reads.full > 0
    node = np.where(reads.rest > 0, tails.find(before, reads.key), before)
    found = (node != NONE) & written[node]
    found[inside] &= last[blocks[reads.place[inside]]]
    whole = reads.rest == 0
    found[whole] &= hashes[reads.place[whole]] == reads.key[whole]

    sizes = columns.block_size[example].tolist()
    every = list(map(Run, parents.tolist(), lengths.tolist(), sizes))
    every += map(Run, tails.parents.tolist(), [1] * len(tails.parents), tails.tokens.tolist())
    paths = _split(runs.tolist(), amounts)
    write = (marks.position, runs_until, tails.numbers, ended)
    writes = _shared(Write, marks.owner, len(columns), (ended, marks.position), write)
    read = [column[found] for column in (reads.position, reads.full, node, reads.rest > 0)]
    plain = (columns.values("tenant"), columns.input_tokens.tolist(), columns.block_size.tolist())
    readable = _shared(Read, reads.owner[found], len(columns), (read[2], read[0]), read)
    prompts = list(map(Prompt, *plain, paths, writes, readable))
    return Layout(columns, prompts, every, np.stack([example, until], axis=1), columns.keys_of(tails.keys))


@dataclass(frozen=True, slots=True)
class _Positions:
    """Hold positions within prompts: full blocks, the tokens behind these, and where the last of the blocks is."""

    owner: Ints
    position: Numbers
    key: Numbers
    full: Ints
    rest: Ints
    place: Ints

    @classmethod
    def of(cls, columns: RecordColumns, name: Literal["marks", "reads"], starts: Ints) -> _Positions:
        """Return those of all prompts, whose blocks begin at `starts`."""
        parts: Parts = getattr(columns, name)
        position, *_, key = parts.flat()
        owner = np.repeat(np.arange(len(columns)), parts.counts)
        full, rest = np.divmod(position, columns.block_size[owner])
        return cls(owner, position, key, full, rest, starts[owner] + full - 1)


@dataclass(frozen=True, slots=True)
class _Tails:
    """Number the tails that marks write, in the order in which they occur first."""

    numbers: Ints  # of each mark; no number where it ends with a block
    parents: Ints  # of each tail: the run before it
    tokens: Ints
    keys: Numbers
    names: Ints  # ascending: run and key of each
    named: Ints  # their numbers
    key_count: int

    @classmethod
    def of(cls, before: Ints, marks: _Positions, key_count: int, runs: int) -> _Tails:
        """Return the tails behind runs, numbered behind all `runs`."""
        some = np.flatnonzero(marks.rest > 0)
        names, places = np.unique((before[some] + 1) * key_count + marks.key[some], return_inverse=True)
        order = ranks(places)
        _, first = np.unique(order, return_index=True)
        first = some[first]
        numbers, named = np.full(len(before), NONE), np.empty(len(names), dtype=np.int64)
        numbers[some] = named[places] = order + runs
        return cls(numbers, before[first], marks.rest[first], marks.key[first], names, named, key_count)

    def find(self, before: Ints, key: Numbers) -> Ints:
        """Return the numbers of tails by the runs before them; NONE where nothing writes such a tail."""
        if not len(self.names):
            return np.full(len(key), NONE)
        wanted = (before + 1) * self.key_count + key
        at = np.minimum(np.searchsorted(self.names, wanted), len(self.names) - 1)
        return np.where(self.names[at] == wanted, self.named[at], NONE)


T = TypeVar("T")


def _shared(
    make: Callable[..., T], owner: Ints, count: int, name: tuple[Numbers, Numbers], columns: Sequence[NDArray[Any]]
) -> list[tuple[T, ...]]:
    """Return what each of `count` owners has, made of the rows of columns; those of one name are one object."""
    first, second = name
    names = (first.astype(np.int64) + 1) * (int(second.max(initial=0)) + 1) + second
    _, rows, places = np.unique(names, return_index=True, return_inverse=True)
    made = list(map(make, *(column[rows].tolist() for column in columns)))
    return _split([made[place] for place in places.tolist()], np.bincount(owner, minlength=count))


def _split(values: Sequence[T], counts: Ints) -> list[tuple[T, ...]]:
    """Cut values into tuples of so many each."""
    rest = iter(values)
    return [tuple(islice(rest, count)) if count else () for count in counts.tolist()]


def _before(values: Numbers, firsts: Ints) -> Numbers:
    """Return the value before each; NONE at `firsts`."""
    shifted = np.roll(values, 1)
    shifted[firsts] = NONE
    return shifted


def _chained(blocks: Numbers, starts: Ints) -> bool:
    """Return True if every block always follows the same one: then it stands for a prefix."""
    return bool((_parents(blocks, starts)[blocks] == _before(blocks, starts)).all())


def _parents(blocks: Numbers, starts: Ints) -> Numbers:
    """Return the block before each, by number."""
    parents = np.full(int(blocks.max(initial=NONE)) + 1, NONE, dtype=blocks.dtype)
    parents[blocks] = _before(blocks, starts)
    return parents


def _by_prefix(blocks: Numbers, counts: Ints) -> Ints:
    """Return a number for the prefix that each block ends, where a block stands behind different ones."""
    numbers: dict[tuple[int, int], int] = {}
    values, found = iter(blocks.tolist()), []
    for count in counts.tolist():
        at = NONE
        for block in islice(values, count):
            at = numbers.setdefault((at, block), len(numbers))
            found.append(at)
    return np.array(found, dtype=np.int64)

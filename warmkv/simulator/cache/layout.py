"""The prompts of a replay as paths of a prefix tree that all replicas, and all points of a sweep, share.

A run ends where prompts end or part, and at breakpoints. So nodes are split only where blocks of one run have
different lives.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.packed_keys import numbers_of
from warmkv.prefixes.record import Mark, RequestRecord

Hashes = Sequence[bytes]
Ints = NDArray[np.int64]
Runs = tuple[int, ...]
NONE = -1


class Write(NamedTuple):
    """A breakpoint: behind so many runs of its prompt, and the number of its tail; NONE if it ends with a block."""

    runs: int
    tail: int


class Read(NamedTuple):
    """A position at which an earlier breakpoint may be read: leading full blocks, and the node that ends there."""

    position: int
    blocks: int
    number: int
    is_tail: bool


@dataclass(slots=True, eq=False)
class Prompt:
    """The full blocks of a prompt as runs, its breakpoints, and those that it may read, highest first."""

    record: RequestRecord = field(repr=False)
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

    prompts: Sequence[Prompt]
    runs: Sequence[Run]
    examples: Ints  # [runs, 2]: number of a prompt, and its leading blocks up to the end of the run
    tails: Sequence[bytes]  # keys; tails are numbered behind the runs

    def keys(self, number: int) -> Hashes:
        """Return the keys of a run's blocks."""
        if number >= len(self.examples):
            return (self.tails[number - len(self.examples)],)
        prompt, end = map(int, self.examples[number])
        return self.prompts[prompt].record.hashes[end - self.runs[number].blocks : end]

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


def layout(records: Sequence[RequestRecord], blocks: Ints | None = None) -> Layout:
    """Lay out prompts as the longest runs that no prompt ends in or leaves.

    `blocks` stand for the blocks of all prompts, one after the other, as small numbers from 0 on.
    """
    chains = [record.hashes for record in records]
    counts = np.array([len(hashes) for hashes in chains], dtype=np.int64)
    marked = [
        (number, full)
        for number, record in enumerate(records)
        for mark in record.marks
        if (full := mark.position // record.block_size)
    ]
    if blocks is None:
        blocks = numbers_of(chains)
    starts = counts.cumsum() - counts
    inner = starts[counts > 0]
    if not _chained(blocks, inner):
        blocks = _by_prefix(blocks, counts)
    parent = _parents(blocks, inner)
    known = np.zeros(len(parent), dtype=bool)
    known[blocks] = True
    last = np.bincount(parent[known] + 1, minlength=len(parent) + 1)[1:] > 1  # blocks behind which prompts part
    last[blocks[inner + counts[counts > 0] - 1]] = True  # or end
    if marked:
        owner, full = np.array(marked).T
        last[blocks[starts[owner] + full - 1]] = True
    number = last.cumsum() - 1  # of runs, by their last block

    places = np.flatnonzero(last[blocks])
    runs = number[blocks[places]]
    owners = np.repeat(np.arange(len(records)), counts)[places]
    amounts = np.bincount(owners, minlength=len(records))  # runs of each prompt
    firsts = (amounts.cumsum() - amounts)[counts > 0]
    begins = _before(places, firsts) + 1
    begins[firsts] = inner
    total = int(last.sum())
    lengths, parents, example, until = np.zeros((4, total), dtype=np.int64)
    lengths[runs], parents[runs] = places + 1 - begins, _before(runs, firsts)
    example[runs], until[runs] = owners, places + 1 - starts[owners]
    sizes = [record.block_size for record in records]
    found = [
        Run(parent, length, sizes[owner])
        for parent, length, owner in zip(parents.tolist(), lengths.tolist(), example.tolist(), strict=True)
    ]
    flat = iter(runs.tolist())
    paths = [tuple(islice(flat, amount)) for amount in amounts.tolist()]
    tails: dict[tuple[int, bytes], int] = {}
    prompts = [
        Prompt(record, path, _writes(record.marks, record.block_size, path, found, tails) if record.marks else ())
        for record, path in zip(records, paths, strict=True)
    ]
    written = {write.tail if write.tail != NONE else p.runs[write.runs - 1] for p in prompts for write in p.writes}
    shared: dict[int, Read] = {}  # by the nodes that they read
    for prompt in prompts:
        if prompt.record.reads:
            prompt.reads = _reads(prompt.record, prompt.runs, _ends(prompt.runs, found), tails, written, shared)
    return Layout(prompts, found, np.stack([example, until], axis=1), [key for _, key in tails])


def _before(values: Ints, firsts: Ints) -> Ints:
    """Return the value before each; NONE at `firsts`."""
    shifted = np.roll(values, 1)
    shifted[firsts] = NONE
    return shifted


def _chained(blocks: Ints, starts: Ints) -> bool:
    """Return True if every block always follows the same one: then it stands for a prefix."""
    return bool((_parents(blocks, starts)[blocks] == _before(blocks, starts)).all())


def _parents(blocks: Ints, starts: Ints) -> Ints:
    """Return the block before each, by number."""
    parents: Ints = np.full(blocks.max(initial=NONE) + 1, NONE)
    parents[blocks] = _before(blocks, starts)
    return parents


def _by_prefix(blocks: Ints, counts: Ints) -> Ints:
    """Return a number for the prefix that each block ends, where a block stands behind different ones."""
    numbers: dict[tuple[int, int], int] = {}
    values, found = iter(blocks.tolist()), []
    for count in counts.tolist():
        at = NONE
        for block in islice(values, count):
            at = numbers.setdefault((at, block), len(numbers))
            found.append(at)
    return np.array(found, dtype=np.int64)


def _ends(path: Runs, runs: Sequence[Run]) -> dict[int, int]:
    """Return how many runs of a path end with so many blocks."""
    return {blocks: count for count, blocks in enumerate(accumulate([runs[run].blocks for run in path], initial=0))}


def _writes(
    marks: Sequence[Mark], size: int, path: Runs, runs: list[Run], tails: dict[tuple[int, bytes], int]
) -> tuple[Write, ...]:
    """Return the breakpoints of a prompt with blocks of `size` tokens, numbering the tails before them."""
    ends, found = _ends(path, runs), []
    for position, _, key in marks:
        blocks, rest = divmod(position, size)
        count, tail = ends[blocks], NONE
        if rest:
            parent = path[count - 1] if count else NONE
            tail = tails.setdefault((parent, key), len(runs))
            if tail == len(runs):
                runs.append(Run(parent, 1, rest))
        found.append(Write(count, tail))
    return tuple(found)


def _reads(
    record: RequestRecord,
    path: Runs,
    ends: Mapping[int, int],
    tails: Mapping[tuple[int, bytes], int],
    written: Container[int],
    shared: dict[int, Read],
) -> tuple[Read, ...]:
    """Return where a prompt may read, leaving out what no prompt writes; equal reads are the same objects."""
    found = []
    for position, key in record.reads:
        blocks, rest = divmod(position, record.block_size)
        count = ends.get(blocks)
        if count is None or (not rest and record.hashes[blocks - 1] != key):
            continue
        parent = path[count - 1] if count else NONE
        number = tails.get((parent, key), NONE) if rest else parent
        if number in written:
            read = shared.get(number)
            if read is None or read.position != position:
                read = shared[number] = Read(position, blocks, number, rest > 0)
            found.append(read)
    return tuple(found)

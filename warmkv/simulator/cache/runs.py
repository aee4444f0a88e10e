"""Prefix blocks by runs: where blocks always come together in the requests at hand, one entry stands for all of them.

A prompt of 12,000 tokens has two dozen blocks, but in a trace most of them are in no other prompt, or all in the same.
`RunCache` keeps such a run as one entry that may have lost its end, and does by the run what `ReplicaCache` does by the
block with the indexes of the live stores. It gives the same results (a test compares them) wherever these are all there
is: tiers that give up the least recently used first, every full block kept for one TTL, no breakpoints, no column sums,
no shares of tenants. Then all tiers note every use of a block, so that it expires everywhere at once; and the least
recently used run of a tier without readers is always the end of a chain.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from warmkv.policies.prefix_cache import Match
from warmkv.prefixes.index import TIERS, Depths
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import BlockTransfer, Removals

Hashes = tuple[bytes, ...]
Ints = NDArray[np.int64]
Runs = tuple[int, ...]
NONE = -1
NOTHING = Match()


@dataclass(frozen=True, slots=True)
class Layout:
    """Each prompt's blocks as runs, by number; the blocks in each run, and the run before it (NONE at a beginning)."""

    runs: Sequence[Runs]
    lengths: Sequence[int]
    parents: Sequence[int]


def layout(prompts: Sequence[Hashes], blocks: Ints | None = None) -> Layout | None:
    """Find the longest runs that no prompt ends in or leaves; None if a block follows different blocks.

    `blocks` stand for the blocks of all prompts, one after the other, as small numbers from 0 on.
    """
    counts = np.array([len(hashes) for hashes in prompts if hashes])
    if not len(counts):
        return Layout([()] * len(prompts), [], [])
    if blocks is None:
        every = list(chain.from_iterable(prompts))
        numbers = {block: number for number, block in enumerate(dict.fromkeys(every))}
        blocks = np.array(list(map(numbers.__getitem__, every)))
    starts = counts.cumsum() - counts
    before = _before(blocks, starts)
    parent = np.full(blocks.max() + 1, NONE)  # the one block before each, by number
    parent[blocks] = before
    if (parent[blocks] != before).any():
        return None

    known = np.zeros(len(parent), dtype=bool)
    known[blocks] = True
    last = np.bincount(parent[known] + 1, minlength=len(parent) + 1)[1:] > 1  # blocks behind which prompts part
    last[blocks[starts + counts - 1]] = True  # or end
    number = last.cumsum() - 1  # of runs, by their last block

    ends = np.flatnonzero(last[blocks])
    runs = number[blocks[ends]]
    amounts = np.add.reduceat(last[blocks], starts, dtype=np.int64)  # runs of each prompt
    firsts = amounts.cumsum() - amounts
    begins = _before(ends, firsts) + 1
    begins[firsts] = starts
    lengths, parents = np.zeros((2, last.sum()), dtype=np.int64)
    lengths[runs], parents[runs] = ends + 1 - begins, _before(runs, firsts)
    flat, of_each = iter(runs.tolist()), iter(amounts.tolist())
    found = [tuple(islice(flat, next(of_each))) if hashes else () for hashes in prompts]
    return Layout(found, lengths.tolist(), parents.tolist())


def _before(values: Ints, firsts: Ints) -> Ints:
    """Return the value before each; NONE at `firsts`."""
    shifted = np.roll(values, 1)
    shifted[firsts] = NONE
    return shifted


@dataclass(slots=True)
class TierSpace:
    """A tier: how much is free, and what it holds."""

    free: int  # blocks
    block_bytes: int
    level: TimeWeightedGauge  # told of its bytes
    held: list[int]  # leading blocks of each run
    order: OrderedDict[int, None] = field(default_factory=OrderedDict)  # runs held, the least recently used first
    pinned: dict[int, int] = field(default_factory=dict)  # leading blocks of runs that requests found here and read
    untold: int = 0  # blocks that came, less those that went, since the level was told


class RunCache:
    """The blocks of one replica, with the methods of `ReplicaCache`.

    `runs` are those of every request, by its id; `rooms` the blocks that fit into each tier and the bytes of one there.
    Blocks live `ttl` seconds after each use.
    """

    def __init__(
        self,
        layout: Layout,
        runs: Mapping[str, Runs],
        tiers: Sequence[str],
        rooms: Sequence[tuple[int, int]],
        ttl: float,
        stored: TimeWeightedGauge,
        levels: Sequence[TimeWeightedGauge],
        removals: Removals,
    ) -> None:
        self._runs, self._ttl, self._stored, self._removals = runs, ttl, stored, removals
        self._places = [
            TierSpace(room, block_bytes, level, [0] * len(layout.lengths))
            for (room, block_bytes), level in zip(rooms, levels, strict=True)
        ]
        self._lengths, self._parents = layout.lengths, layout.parents
        self._held = [(TIERS.index(name), place.held) for name, place in zip(tiers, self._places, strict=True)]
        self._memory = [place for name, place in zip(tiers, self._places, strict=True) if name != "disk"]
        self.due = math.inf  # nothing expires before
        self._used = [-math.inf] * len(layout.lengths)  # when each run was used last
        self._uses: deque[tuple[float, Runs]] = deque()  # in order; a run expires a TTL after the last that names it
        self._matches: dict[int, Match] = {}  # by their blocks: there are few, for many requests
        self._readers: dict[str, list[dict[int, int]]] = {}  # what requests found and pinned, tier by tier

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each run at the time it ended."""
        while self.due <= now:
            at, runs = self._uses.popleft()
            for run in reversed(runs):
                if self._used[run] == at and not self._is_read(run):
                    for place in self._places:
                        if gone := place.held[run]:
                            self._removals.expired += gone
                            self._shorten(place, run, gone)
            self._tell(self.due)
            self.due = self._uses[0][0] + self._ttl if self._uses else math.inf

    def _is_read(self, run: int) -> bool:
        """Return True if a request reads a run, which then does not expire."""
        return any(run in pinned for tiers in self._readers.values() for pinned in tiers)

    def depths(self, runs: Runs) -> Depths:
        """Return leading blocks of a prompt by tier, as the routers' index has them: those in it or in a faster one."""
        if not runs:
            return 0, 0, 0
        lengths, device, host, anywhere = self._lengths, 0, 0, 0
        last, had = runs[0], 0  # where the longest part so far ends, and what it has of that run
        for tier, held in self._held:
            if held[last] > had:  # else this tier has no more
                count = 0  # as `_leading`, which would take a call for each of many replicas
                for run in runs:
                    blocks = held[run]
                    count += blocks
                    if blocks < lengths[run]:
                        break
                if count > anywhere:
                    anywhere, last, had = count, run, blocks
            if tier < 2:
                host = anywhere
                if tier < 1:
                    device = anywhere
        return device, host, anywhere

    def match(self, record: RequestRecord, now: float) -> Match:
        """Look up the longest resident prefix of a prompt; refresh it and pin it until `release`."""
        runs = self._runs[record.id]
        blocks = self._leading(self._places[0], runs)
        for place in self._places[1:]:
            blocks = max(blocks, self._leading(place, runs))
        if not blocks:
            return NOTHING
        reading = self._use(runs, now)
        pinned_by_tier = self._readers[record.id] = []
        for place in self._places:
            held, pinned = place.held, dict[int, int]()
            for run in reversed(reading):
                if held[run]:
                    place.order.move_to_end(run)
                    pinned[run] = held[run]
                    if held[run] > place.pinned.get(run, 0):
                        place.pinned[run] = held[run]
            pinned_by_tier.append(pinned)
        found = self._matches.get(blocks)
        if found is None:
            found = self._matches[blocks] = Match(blocks=blocks, tokens=blocks * record.block_size)
        return found

    def store(self, record: RequestRecord, marks: Sequence[Mark], now: float, match: Match | None, begun: float) -> int:
        """Keep the blocks of a prompt, as many from its beginning as fit; without marks.

        What was found further down moves up to the first tier. What does not fit there is kept in the next.
        """
        runs, lengths = self._runs[record.id], self._lengths
        if not runs:
            return 0
        tiers = len(self._places)
        if tiers > 1 and match is not None and match.blocks > self._leading(self._places[0], runs):
            self._keep(0, *self._begun(runs, match.blocks))
        for tier in range(tiers):
            if self._keep(tier, runs, lengths[runs[-1]]):
                break
        self._use(runs, now)
        self._tell(now)
        return 0

    def release(self, record: RequestRecord, match: Match) -> None:
        """Let go what a request found."""
        released = self._readers.pop(record.id, None)
        if released is None:
            return
        for tier, (place, gone) in enumerate(zip(self._places, released, strict=True)):
            for run in gone:
                left = max((pinned[tier].get(run, 0) for pinned in self._readers.values()), default=0)
                if left:
                    place.pinned[run] = left
                else:
                    del place.pinned[run]

    def sums(self, match: Match, record: RequestRecord, most: int, now: float) -> int:
        """Return 0: none are kept, since no request needs them."""
        return 0

    def store_sums(
        self, record: RequestRecord, marks: Sequence[Mark], reused: int, token_bytes: int, now: float
    ) -> None:
        """Keep none."""

    def leading(self, record: RequestRecord, most: int, now: float) -> Depths:
        """Count the leading blocks of a prompt, at most `most`, by tier: those in it or in a faster one."""
        device, host, anywhere = self.depths(self._runs[record.id])
        return min(device, most), min(host, most), min(anywhere, most)

    def lend(self, record: RequestRecord, first: int, last: int, most: int, sums: bool, now: float) -> BlockTransfer:
        """Return blocks of a prompt from number `first` on and before `last`, as far as they are in memory here.

        At most `most` bytes, but at least a block.
        """
        runs, nbytes = self._runs[record.id], 0
        dead = (
            at for at, run in enumerate(runs) if self._used[run] + self._ttl <= now
        )  # there only for who reads them
        runs = runs[: next(dead, len(runs))]
        held = [(self._leading(place, runs), place.block_bytes) for place in self._memory]
        end = min(last, max(count for count, _ in held))
        for at in range(first, end):
            size = next(size for count, size in held if at < count)
            if at > first and nbytes + size > most:
                return BlockTransfer(nbytes, at, more=True)
            nbytes += size
        return BlockTransfer(nbytes, end)

    def adopt(self, record: RequestRecord, transfer: BlockTransfer, now: float) -> None:
        """Insert fetched blocks that a request is about to read, with a full TTL."""
        runs, count = self._begun(self._runs[record.id], transfer.blocks)
        for tier in range(len(self._places)):
            if self._keep(tier, runs, count):
                break
        self._use(self._runs[record.id], now)
        self._tell(now)

    def _begun(self, runs: Runs, blocks: int) -> tuple[Runs, int]:
        """Return the runs of a chain's leading blocks, at least one, and how many of them are in the last run."""
        lengths, found = self._lengths, 0
        while blocks > lengths[runs[found]]:
            blocks -= lengths[runs[found]]
            found += 1
        return runs[: found + 1], blocks

    def _leading(self, place: TierSpace, runs: Runs) -> int:
        """Return leading blocks of a chain that a tier holds."""
        held, lengths, count = place.held, self._lengths, 0
        for run in runs:
            count += held[run]
            if held[run] < lengths[run]:
                break
        return count

    def _use(self, runs: Runs, now: float) -> Runs:
        """Let what is held of a chain live its TTL again; those runs."""
        used, top = self._used, self._places[0].held
        for count, run in enumerate(runs):
            if not top[run] and not any(held[run] for _, held in self._held):
                runs = runs[:count]
                break
            used[run] = now
        if runs and self._ttl < math.inf:
            self._uses.append((now, runs))
            if now + self._ttl < self.due:
                self.due = now + self._ttl
        return runs

    def _keep(self, tier: int, runs: Runs, last: int) -> bool:
        """Hold a chain, of whose last run so many blocks, as far as it fits, as the most recent of a tier; whether all
        fits.

        What gives way goes down a tier, together with the chain before it.
        """
        place, whole, kept = self._places[tier], True, len(runs)
        held, lengths = place.held, self._lengths
        evicted: list[tuple[int, int]] = []
        for at, run in enumerate(runs, start=1):
            missing = (lengths[run] if at < len(runs) else last) - held[run]
            if missing <= 0:
                continue
            if missing > place.free:
                self._make_room(place, missing, runs, evicted)
            new = min(missing, place.free)
            place.free -= new
            place.untold += new
            held[run] += new
            if new < missing:
                whole, kept = False, at if held[run] else at - 1
                break
        order = place.order
        for run in reversed(runs[:kept]):
            order[run] = None
            order.move_to_end(run)
        if tier + 1 < len(self._places):
            below = self._places[tier + 1]
            for run, blocks in evicted:
                if below.held[run] < blocks:
                    self._keep(tier + 1, self._path(run), blocks)
        return whole

    def _make_room(self, place: TierSpace, blocks: int, stays: Runs, evicted: list[tuple[int, int]]) -> None:
        """Evict until `blocks` are free or nothing more can be; record evicted runs with their blocks."""
        pinned, held, order, missing = place.pinned, place.held, place.order, blocks - place.free
        while missing > 0:
            for run in order:
                if run not in stays and (loose := held[run] - pinned.get(run, 0)) > 0:
                    break
            else:
                break
            gone = loose if loose < missing else missing
            missing -= gone
            evicted.append((run, held[run]))
            held[run] -= gone
            if not held[run]:
                del order[run]
        gone = blocks - place.free - missing
        self._removals.evicted += gone
        place.free += gone
        place.untold -= gone

    def _path(self, run: int) -> Runs:
        """Return the chain from its beginning to a run."""
        path = []
        while run != NONE:
            path.append(run)
            run = self._parents[run]
        return tuple(reversed(path))

    def _shorten(self, place: TierSpace, run: int, blocks: int) -> None:
        place.held[run] -= blocks
        place.free += blocks
        place.untold -= blocks
        if not place.held[run]:
            del place.order[run]

    def _tell(self, now: float) -> None:
        total = 0
        for place in self._places:
            if place.untold:
                difference, place.untold = place.untold * place.block_bytes, 0
                place.level.change(difference, now)
                total += difference
        if total:
            self._stored.change(total, now)

    def drop(self, now: float) -> None:
        """Drop everything: the replica is gone."""
        for place in self._places:
            place.untold -= sum(place.held)
            place.held[:] = [0] * len(place.held)
            place.order.clear()
        self._uses.clear()
        self.due = math.inf
        self._tell(now)

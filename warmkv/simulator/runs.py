"""Prefix blocks by runs: where blocks always come together in the requests at hand, one entry stands for all of them.

A prompt of 12,000 tokens has two dozen blocks, but in a trace most of them are in no other prompt, or all in the same.
`RunCache` keeps such a run as one entry that may have lost its end, and does by the run what `ReplicaCache` does by the
block with the ledgers of the live stores. It gives the same results (a test compares them) wherever these are all there
is: tiers that give up the least recently used first, every full block kept for one TTL, no breakpoints, no column sums,
no shares of tenants. Then all tiers note every use of a block, so that it expires everywhere at once; and the least
recently used run of a tier that nobody reads is always the end of a chain.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from warmkv.policies.prefix_cache import Match
from warmkv.prefixes.index import TIERS, Depths
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.cache import Removals
from warmkv.simulator.measures import Level

Hashes = tuple[bytes, ...]
NONE = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """Every prompt's blocks as runs, by number; the blocks in each run, and the run before it (NONE at a beginning)."""

    runs: Mapping[Hashes, tuple[int, ...]]
    lengths: Sequence[int]
    parents: Sequence[int]


def layout(prompts: Iterable[Hashes]) -> Layout | None:
    """The longest runs that no prompt ends in or leaves; None if some block has no one block before it."""
    distinct = dict.fromkeys(prompts)
    before: dict[bytes, bytes] = {}
    for hashes in distinct:
        before.update(zip(hashes, (b"", *hashes), strict=False))
    if any(list(map(before.__getitem__, hashes)) != [b"", *hashes][:-1] for hashes in distinct):
        return None
    ends = {block for block, followers in Counter(before.values()).items() if followers > 1}
    ends.update(hashes[-1] for hashes in distinct if hashes)

    numbers: dict[bytes, int] = {}  # of runs, by their last block
    lengths: list[int] = []
    parents: list[int] = []
    runs: dict[Hashes, tuple[int, ...]] = {}
    for hashes in distinct:
        start, found = 0, [NONE]
        for end in [at for at, block in enumerate(hashes, start=1) if block in ends]:
            last = hashes[end - 1]
            if last not in numbers:
                numbers[last] = len(lengths)
                lengths.append(end - start)
                parents.append(found[-1])
            found.append(numbers[last])
            start = end
        runs[hashes] = tuple(found[1:])
    return Layout(runs, lengths, parents)


@dataclass(slots=True)
class Place:
    """A tier: how much is free, and what it holds."""

    free: int  # blocks
    block_bytes: int
    level: Level  # told of its bytes
    held: list[int]  # leading blocks of each run
    order: OrderedDict[int, None] = field(default_factory=OrderedDict)  # runs held, the least recently used first
    pinned: dict[int, int] = field(default_factory=dict)  # leading blocks of runs that a request found here and reads
    untold: int = 0  # blocks that came, less those that went, since the level was told


class RunCache:
    """The blocks of one replica, with the methods of `ReplicaCache`. One prompt is computed at a time.

    `rooms` are the blocks that fit into each tier and the bytes of one there. Blocks live `ttl` seconds after each use.
    """

    def __init__(
        self,
        layout: Layout,
        tiers: Sequence[str],
        rooms: Sequence[tuple[int, int]],
        ttl: float,
        stored: Level,
        levels: Sequence[Level],
        removals: Removals,
    ) -> None:
        self._layout, self._ttl, self._stored, self._removals = layout, ttl, stored, removals
        self._places = [
            Place(room, block_bytes, level, [0] * len(layout.lengths))
            for (room, block_bytes), level in zip(rooms, levels, strict=True)
        ]
        self._tiers = [TIERS.index(name) for name in tiers]
        self._deadlines: OrderedDict[int, float] = OrderedDict()  # of runs, the first to expire first
        self._due = math.inf  # nothing expires before
        self._reading: tuple[int, ...] = ()  # runs that do not expire

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each run at the time it ended."""
        while self._due <= now:
            run, self._due = next(iter(self._deadlines.items()), (NONE, math.inf))
            if self._due > now or run in self._reading:
                return
            del self._deadlines[run]
            for place in self._places:
                if gone := place.held[run]:
                    self._removals.expired += gone
                    self._shorten(place, run, gone)
            self._tell(self._due)

    def leading(self, hashes: Hashes) -> int:
        """Leading blocks of a prompt that some tier holds."""
        return self.depths(hashes)[-1]

    def depths(self, hashes: Hashes) -> Depths:
        """Leading blocks of a prompt by tier, as the routers' index has them: those in it or in a faster one."""
        runs, lengths, found = self._layout.runs[hashes], self._layout.lengths, [0] * len(TIERS)
        for tier, place in zip(self._tiers, self._places, strict=True):
            count, blocks = 0, place.held
            for run in runs:
                held = blocks[run]
                count += held
                if held < lengths[run]:
                    break
            found[tier] = count
        device, host, anywhere = itertools.accumulate(found, max)
        return device, host, anywhere

    def match(self, record: RequestRecord, now: float) -> Match:
        """The longest resident prefix of a prompt; notes the read and keeps what was found until `release`."""
        blocks = self.leading(record.hashes)
        if blocks:
            self._reading = self._prolong(self._layout.runs[record.hashes], now)
            for place in self._places:
                for run in reversed(self._reading):
                    if place.held[run]:
                        place.order.move_to_end(run)
                        place.pinned[run] = place.held[run]
        return Match(blocks=blocks, tokens=blocks * record.block_size)

    def store(self, record: RequestRecord, marks: Sequence[Mark], now: float, match: Match | None, begun: float) -> int:
        """Keep the full blocks of a computed prompt, as many from its beginning as fit; there are no marks.

        What was found further down moves up to the first tier. What does not fit there is kept in the next.
        """
        lengths = self._layout.lengths
        chain = [(run, lengths[run]) for run in self._layout.runs[record.hashes]]
        left, found = match.blocks if match is not None else 0, []
        for run, length in chain:
            if left > 0:
                found.append((run, min(left, length)))
                left -= length
        self._keep(0, found)
        for tier in range(len(self._places)):
            if self._keep(tier, chain):
                break
        self._prolong(self._layout.runs[record.hashes], now)
        self._tell(now)
        return 0

    def release(self, match: Match) -> None:
        self._reading = ()
        for place in self._places:
            place.pinned.clear()

    def sums(self, match: Match, record: RequestRecord, most: int, now: float) -> int:
        """None are kept: no request needs them."""
        return 0

    def store_sums(
        self, record: RequestRecord, marks: Sequence[Mark], reused: int, token_bytes: int, now: float
    ) -> None:
        """Likewise."""

    def _prolong(self, runs: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Let what is held of a chain live its TTL again; those runs."""
        count = 0
        while count < len(runs) and any(place.held[runs[count]] for place in self._places):
            count += 1
        deadline = now + self._ttl
        self._due = min(self._due, deadline)
        for run in reversed(runs[:count]):
            self._deadlines[run] = deadline
            self._deadlines.move_to_end(run)
        return runs[:count]

    def _keep(self, tier: int, chain: Sequence[tuple[int, int]]) -> bool:
        """Hold so many blocks of each run, as far as they fit, as the most recent of a tier; whether all fit.

        What gives way goes down a tier, together with the chain before it.
        """
        place, whole = self._places[tier], True
        stays = {run for run, _ in chain}
        evicted: list[tuple[int, int]] = []
        kept: list[int] = []
        for run, blocks in chain:
            missing = blocks - place.held[run]
            if missing > 0:
                self._make_room(place, missing, stays, evicted)
                new = min(missing, place.free)
                whole = new == missing
                place.free -= new
                place.untold += new
                place.held[run] += new
            if place.held[run]:
                kept.append(run)
            if not whole:
                break
        for run in reversed(kept):
            place.order[run] = None
            place.order.move_to_end(run)
        if tier + 1 < len(self._places):
            below = self._places[tier + 1]
            for run, blocks in evicted:
                if below.held[run] < blocks:
                    self._keep(tier + 1, self._path(run, blocks))
        return whole

    def _make_room(self, place: Place, blocks: int, stays: set[int], evicted: list[tuple[int, int]]) -> None:
        """Evict until so many blocks are free, or nothing else can go; notes runs with the blocks they had."""
        while place.free < blocks:
            pinned, held = place.pinned, place.held
            run = next((run for run in place.order if run not in stays and held[run] > pinned.get(run, 0)), None)
            if run is None:
                return
            gone = min(held[run] - pinned.get(run, 0), blocks - place.free)
            evicted.append((run, place.held[run]))
            self._removals.evicted += gone
            self._shorten(place, run, gone)

    def _path(self, run: int, blocks: int) -> list[tuple[int, int]]:
        """The chain from its beginning to so many blocks of a run."""
        path, at = [(run, blocks)], self._layout.parents[run]
        while at != NONE:
            path.append((at, self._layout.lengths[at]))
            at = self._layout.parents[at]
        return path[::-1]

    def _shorten(self, place: Place, run: int, blocks: int) -> None:
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
        """Everything is gone, with the replica."""
        for place in self._places:
            place.untold -= sum(place.held)
            place.held = [0] * len(place.held)
            place.order.clear()
        self._tell(now)

"""Prefix blocks by runs: where blocks always come together in the requests at hand, one entry stands for all of them.

A prompt of 12,000 tokens has two dozen blocks, but in a trace most of them are in no other prompt, or all in the same.
`RunCache` keeps such a run as one entry that may have lost its end, and does by the run what `ReplicaCache` does by the
block with the ledger of the live stores. It gives the same results (a test compares them) wherever these are all there
is: one tier, least recently used first, every full block kept for one TTL, no breakpoints, no column sums, no shares of
tenants. Then the least recently used run is always the end of a chain that nobody reads, and the first to expire.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from warmkv.policies.prefix_cache import Match
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.cache import Removals
from warmkv.simulator.measures import Level

Hashes = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Every prompt's blocks as runs, by number, and the blocks in each run."""

    runs: Mapping[Hashes, tuple[int, ...]]
    lengths: Sequence[int]


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
    runs: dict[Hashes, tuple[int, ...]] = {}
    for hashes in distinct:
        start, found = 0, []
        for end in [at for at, block in enumerate(hashes, start=1) if block in ends]:
            last = hashes[end - 1]
            if last not in numbers:
                numbers[last] = len(lengths)
                lengths.append(end - start)
            found.append(numbers[last])
            start = end
        runs[hashes] = tuple(found)
    return Layout(runs, lengths)


class RunCache:
    """The blocks of one replica, with the methods of `ReplicaCache`. One prompt is computed at a time.

    There is room for so many blocks. All have `block_bytes`, and live `ttl` seconds after each use.
    """

    def __init__(
        self, layout: Layout, room: int, block_bytes: int, ttl: float, levels: Sequence[Level], removals: Removals
    ) -> None:
        self._runs, self._lengths = layout.runs, layout.lengths
        self._free, self._block_bytes, self._ttl = room, block_bytes, ttl
        self._levels, self._removals = levels, removals
        self._held = [0] * len(layout.lengths)  # leading blocks of each run
        self._deadlines: OrderedDict[int, float] = OrderedDict()  # of runs that are held, least recently used first
        self._due = math.inf  # nothing expires before
        self._reading: tuple[int, ...] = ()  # runs that can go neither by eviction nor by age

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each run at the time it ended."""
        while self._due <= now:
            run, self._due = next(iter(self._deadlines.items()), (-1, math.inf))
            if self._due > now or run in self._reading:
                return
            del self._deadlines[run]
            self._removals.expired += self._held[run]
            self._change(-self._held[run], self._due)
            self._held[run] = 0

    def leading(self, hashes: Hashes) -> int:
        """Leading blocks of a prompt that are held."""
        count = 0
        for run in self._runs[hashes]:
            held = self._held[run]
            count += held
            if held < self._lengths[run]:
                break
        return count

    def match(self, record: RequestRecord, now: float) -> Match:
        """The longest resident prefix of a prompt; notes the read and keeps what was found until `release`."""
        runs = self._runs[record.hashes]
        blocks = self.leading(record.hashes)
        if blocks:
            self._reading = self._use(runs, now)
        return Match(blocks=blocks, tokens=blocks * record.block_size)

    def store(self, record: RequestRecord, marks: Sequence[Mark], now: float, match: Match | None = None) -> int:
        """Keep the full blocks of a computed prompt, as many from its beginning as fit; there are no marks."""
        runs, free = self._runs[record.hashes], self._free
        for run in runs:
            missing = self._lengths[run] - self._held[run]
            if not missing:
                continue
            self._make_room(missing, runs)
            new = min(missing, self._free)
            self._free -= new
            self._held[run] += new
            if self._held[run]:
                self._deadlines[run] = now
            if new < missing:
                break
        self._use(runs, now)
        self._free, difference = free, free - self._free
        self._change(difference, now)
        return 0

    def release(self, match: Match) -> None:
        self._reading = ()

    def sums(self, match: Match, record: RequestRecord, most: int, now: float) -> int:
        """None are kept: no request needs them."""
        return 0

    def store_sums(
        self, record: RequestRecord, marks: Sequence[Mark], reused: int, token_bytes: int, now: float
    ) -> None:
        """Likewise."""

    def _use(self, runs: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Make what is held of a chain recent, its beginning most of all; those runs."""
        count = next((at for at, run in enumerate(runs) if not self._held[run]), len(runs))
        deadline = now + self._ttl
        self._due = min(self._due, deadline)
        for run in reversed(runs[:count]):
            self._deadlines[run] = deadline
            self._deadlines.move_to_end(run)
        return runs[:count]

    def _make_room(self, blocks: int, chain: tuple[int, ...]) -> None:
        """Evict until so many blocks are free, or all that is left belongs to the chain itself."""
        while self._free < blocks:
            victim = next(iter(self._deadlines), None)
            if victim is None or victim in chain:
                return
            gone = min(self._held[victim], blocks - self._free)
            self._held[victim] -= gone
            self._free += gone
            self._removals.evicted += gone
            if not self._held[victim]:
                del self._deadlines[victim]

    def _change(self, blocks: int, now: float) -> None:
        if blocks:
            self._free -= blocks
            for level in self._levels:
                level.change(blocks * self._block_bytes, now)

"""The prefix blocks of one simulated replica: the live rules in virtual time, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmkv.policies.prefix_cache import Lifetimes, Match, PrefixCache, sum_positions
from warmkv.prefixes.index import PrefixIndex
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.measures import Level


@dataclass(slots=True)
class Removals:
    """Blocks and tails that left the stores, and why."""

    evicted: int = 0
    expired: int = 0


class ReplicaCache:
    """Blocks of one replica, known to the router through `index`. Times are virtual seconds."""

    def __init__(
        self,
        replica: str,
        capacity: int,
        token_bytes: int,
        lifetimes: Lifetimes,
        index: PrefixIndex,
        stored: Level,
        removals: Removals,
    ) -> None:
        self._replica, self._index, self._stored, self._removals = replica, index, stored, removals
        self._cache = PrefixCache(capacity, token_bytes, lifetimes)

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each entry at the time it ended."""
        ledger = self._cache.ledger
        while (deadline := ledger.next_deadline) <= now:
            before = ledger.bytes
            if gone := ledger.expire(deadline):
                self._removals.expired += len(gone)
                self._stored.change(ledger.bytes - before, deadline)
                self._index.remove(self._replica, gone)

    def match(self, record: RequestRecord, now: float) -> Match:
        """The longest resident prefix of a prompt; notes the read and pins what was found."""
        return self._cache.match(record.hashes, record.reads, record.block_size, now)

    def sums(self, match: Match, record: RequestRecord, most: int, now: float) -> int:
        """Tokens of a match that a rule can go on from which needs what all queries gave; at most `most`."""
        return self._cache.match_sums(match, record.block_size, most, now)[0]

    def store_sums(
        self, record: RequestRecord, marks: Sequence[Mark], reused: int, token_bytes: int, now: float
    ) -> None:
        """Keep what the queries of a prompt gave its tokens, where that was computed: beyond the reused ones."""
        positions = [at for at in sum_positions(record.input_tokens, record.block_size, marks) if at > reused]
        before = self._cache.ledger.bytes
        for _, _, change in self._cache.store_sums(
            record.hashes, marks, positions, token_bytes, record.block_size, now
        ):
            self._removals.evicted += len(change.evicted)
            self._index.remove(self._replica, change.evicted)
        if (difference := self._cache.ledger.bytes - before) != 0:
            self._stored.change(difference, now)

    def release(self, match: Match) -> None:
        self._cache.release(match)

    def store(self, record: RequestRecord, marks: Sequence[Mark], now: float) -> int:
        """Keep a computed prompt; the position of its highest mark that is stored now."""
        ledger = self._cache.ledger
        before = ledger.bytes
        for change in self._cache.store(record.hashes, marks, record.block_size, now):
            if change.evicted:
                self._removals.evicted += len(change.evicted)
                self._index.remove(self._replica, change.evicted)
            if change.stored:
                self._index.add(self._replica, [span.key for span in change.stored])
        if (difference := ledger.bytes - before) != 0:
            self._stored.change(difference, now)
        return self._cache.highest_mark(marks, now)

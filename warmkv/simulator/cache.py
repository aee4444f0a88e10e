"""The prefix blocks of one simulated replica: the live rules in virtual time, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from warmkv.policies.prefix_cache import Lifetimes, Match, PrefixCache, Span, sum_positions
from warmkv.policies.tiers import Left, Step, Stored, Tier
from warmkv.prefixes.index import TIERS, PrefixIndex
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.late_index import LateIndex
from warmkv.simulator.measures import Level

Key = bytes


@dataclass(slots=True)
class Removals:
    """Blocks and tails that left a tier, and why."""

    evicted: int = 0
    expired: int = 0


class ReplicaCache:
    """Blocks of one replica in its tiers, known to the router through `index`. Times are virtual seconds.

    `stored` and, tier by tier, `by_tier` are told of all bytes that come and go, and `late`, if there is one, of what
    the index is told.

    What moves between tiers is there at once: a fetch from a lower tier takes no time.
    """

    def __init__(
        self,
        replica: str,
        tiers: Sequence[Tier],
        token_bytes: int,
        lifetimes: Lifetimes,
        index: PrefixIndex,
        stored: Level,
        removals: Removals,
        share: float = 0.0,
        by_tier: Sequence[Level] = (),
        late: LateIndex | None = None,
    ) -> None:
        self._replica, self._index, self._stored, self._removals = replica, index, stored, removals
        self._cache = PrefixCache(tiers, token_bytes, lifetimes, share)
        self._levels = by_tier or [Level() for _ in tiers]
        self._known = [0] * len(tiers)
        self._late = late

    @property
    def bytes(self) -> int:
        """Of all tiers together."""
        return sum(ledger.bytes for ledger in self._cache.tiers.ledgers)

    @property
    def due(self) -> float:
        """Nothing expires before this time."""
        return self._cache.tiers.next_deadline

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each entry at the time it ended."""
        tiers = self._cache.tiers
        while (deadline := tiers.next_deadline) <= now:
            self._note(((step, None) for step in tiers.expire(deadline)), deadline)

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
        size = record.block_size
        positions = [at for at in sum_positions(record.input_tokens, size, marks) if at > reused]
        steps = self._cache.store_sums(record.hashes, marks, positions, token_bytes, size, now, record.tenant)
        self._note(steps, now)

    def release(self, match: Match) -> None:
        self._cache.release(match)

    def store(self, record: RequestRecord, marks: Sequence[Mark], now: float, match: Match | None, begun: float) -> int:
        """Keep a computed prompt; the position of its highest mark that is stored now.

        `match` is what was found of it: it moves up to the first tier. Marks live from when the request began.
        """
        steps = self._cache.store(record.hashes, marks, record.block_size, now, record.tenant, match, begun)
        self._note(steps, now)
        return self._cache.highest_mark(marks, now)

    def _note(self, steps: Iterable[tuple[Step, Span | None]], now: float) -> None:
        for step, span in steps:
            tiers, key = self._cache.tiers, step.key
            if isinstance(step, Stored) and span is not None and not span.sums:
                self._tell(key, tiers.fastest(key) or TIERS[0], now)
            elif isinstance(step, Left):
                self._removals.expired += step.expired
                self._removals.evicted += not step.expired
                if (below := tiers.fastest(key)) is None:
                    self._tell(key, None, now)
                elif self._index.holds(self._replica, key):
                    self._tell(key, below, now)
        total = 0
        for tier, ledger in enumerate(self._cache.tiers.ledgers):
            if (difference := ledger.bytes - self._known[tier]) != 0:
                self._known[tier] += difference
                self._levels[tier].change(difference, now)
                total += difference
        if total:
            self._stored.change(total, now)

    def drop(self, now: float) -> None:
        """Everything is gone, with the replica."""
        self._index.drop_replica(self._replica)
        for level, known in zip(self._levels, self._known, strict=True):
            level.change(-known, now)
        self._stored.change(-sum(self._known), now)
        self._known = [0] * len(self._known)

    def _tell(self, key: Key, tier: str | None, now: float) -> None:
        """The fastest tier that has a block, or None: it is held no more."""
        if tier is None:
            self._index.remove(self._replica, (key,))
        else:
            self._index.add(self._replica, (key,), tier)
        if self._late is not None:
            self._late.happened(self._replica, (key,), tier, now)

"""The prefix blocks of one simulated replica: the live rules in virtual time, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from warmkv.policies.contents import Contents, restore
from warmkv.policies.entry import Entry
from warmkv.policies.prefix_cache import Lifetimes, Match, PrefixCache, Span, sum_positions, sums_key
from warmkv.policies.tiers import Left, Step, Stored, Tier
from warmkv.prefixes.index import TIERS, Depths, PrefixIndex
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.cache.late_index import LateIndex
from warmkv.simulator.cache.measures import TimeWeightedGauge

Key = bytes


@dataclass(slots=True)
class Removals:
    """Blocks and tails that left a tier, and why."""

    evicted: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks on their way from one replica to another."""

    nbytes: int
    blocks: int = 0  # leading blocks of the prompt that are there once it has arrived
    more: bool = False  # whether the donor has more than fits into one
    chains: Sequence[Sequence[Entry]] = ()  # from their first blocks on; times are seconds that are left


class ReplicaCache:
    """Blocks of one replica in its tiers, known to the router through `index`. Times are virtual seconds.

    `stored` and, tier by tier, `by_tier` are told of all bytes that come and go, and `late`, if there is one, of what
    the index is told.

    What moves down is there at once; what reading from a lower tier takes is the replica's matter.
    """

    def __init__(
        self,
        replica: str,
        tiers: Sequence[Tier],
        token_bytes: int,
        lifetimes: Lifetimes,
        index: PrefixIndex,
        stored: TimeWeightedGauge,
        removals: Removals,
        share: float = 0.0,
        by_tier: Sequence[TimeWeightedGauge] = (),
        late: LateIndex | None = None,
    ) -> None:
        self._replica, self._index, self._stored, self._removals = replica, index, stored, removals
        self._cache = PrefixCache(tiers, token_bytes, lifetimes, share)
        self._levels = by_tier or [TimeWeightedGauge() for _ in tiers]
        self._known = [0] * len(tiers)
        self._late = late
        tier_indexes = list(zip(tiers, self._cache.tiers.indexes, strict=True))
        self._memory = [tier_index for tier, tier_index in tier_indexes if tier.name != "disk"]
        self._tier_indexes = [(TIERS.index(tier.name), tier_index) for tier, tier_index in tier_indexes]
        self._ttl = lifetimes.default

    @property
    def bytes(self) -> int:
        """Return the bytes of all tiers together."""
        return sum(tier_index.bytes for tier_index in self._cache.tiers.indexes)

    @property
    def due(self) -> float:
        """Return the earliest time at which something can expire."""
        return self._cache.tiers.next_deadline

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each entry at the time it ended."""
        tiers = self._cache.tiers
        while (deadline := tiers.next_deadline) <= now:
            self._note(((step, None) for step in tiers.expire(deadline)), deadline)

    def match(self, record: RequestRecord, now: float) -> Match:
        """Look up the longest resident prefix of a prompt; refresh and pin it."""
        return self._cache.match(record.hashes, record.reads, record.block_size, now)

    def sums(self, match: Match, record: RequestRecord, most: int, now: float) -> int:
        """Return tokens of a match that a rule can go on from which needs what all queries gave; at most `most`."""
        return self._cache.match_sums(match, record.block_size, most, now)[0]

    def store_sums(
        self, record: RequestRecord, marks: Sequence[Mark], reused: int, token_bytes: int, now: float
    ) -> None:
        """Keep what the queries of a prompt gave its tokens, where that was computed: beyond the reused ones."""
        size = record.block_size
        positions = [at for at in sum_positions(record.input_tokens, size, marks) if at > reused]
        steps = self._cache.store_sums(record.hashes, marks, positions, token_bytes, size, now, record.tenant)
        self._note(steps, now)

    def release(self, record: RequestRecord, match: Match) -> None:
        """Let go what a request found."""
        self._cache.release(match)

    def restore(self, contents: Contents, now: float, wall: float) -> None:
        """Insert what a running replica held into an empty cache, whose clock shows `now` at the Unix time `wall`."""
        tiers = self._cache.tiers
        restore(tiers, contents, now, wall)
        for key in {key for tier_index in tiers.indexes for key in tier_index.keys_of()}:
            self._tell(key, tiers.fastest(key), now)
        self._note((), now)

    # --- from and to other replicas

    def leading(self, record: RequestRecord, most: int, now: float) -> Depths:
        """Count the leading blocks of a prompt, at most `most`, by tier: those in it or in a faster one."""
        keys, found = record.hashes[:most], [0, 0, 0]
        for tier, tier_index in self._tier_indexes:
            found[tier] = tier_index.match(keys, now)
        device, host, _ = found
        return device, max(device, host), max(found)

    def lend(self, record: RequestRecord, first: int, last: int, most: int, sums: bool, now: float) -> BlockTransfer:
        """Return blocks of a prompt from number `first` on and before `last`, as far as they are in memory here.

        At most `most` bytes, but at least a block. With the last of them come tails that may be read; with `sums`, no
        more blocks than there are column sums for, and these as well.
        """
        path = self._found(record.hashes[:last], now)
        size = record.block_size
        tails = [(read.position // size, read.key) for read in record.reads if read.position % size]
        beside = [(end, entry) for end, key in tails if end <= len(path) and (entry := self._entry(key, now))]
        if sums:
            ends = [(at, entry.key) for at, entry in enumerate(path, start=1)]
            ends += [(end, entry.key) for end, entry in beside]
            summed = [(end, key, entry) for end, key in ends if (entry := self._entry(sums_key(key), now))]
            path = path[: max([end for end, _, _ in summed], default=0)]
            beside = [(end, entry) for end, entry in beside if end <= len(path)]
        nbytes = 0
        for count, entry in enumerate(path[first:]):
            nbytes += entry.size
            if count and nbytes > most:
                end = first + count
                return BlockTransfer(nbytes - entry.size, end, True, [path[:end]])
        chains = [path, *([*path[:end], entry] for end, entry in beside)]
        if sums:
            behind = {entry.key: [*path[:end], entry] for end, entry in beside}
            behind |= {entry.key: path[:end] for end, entry in enumerate(path, start=1)}
            chains += [[*behind[key], entry] for _, key, entry in summed if key in behind]
            nbytes += sum(entry.size for _, key, entry in summed if key in behind)
        nbytes += sum(entry.size for _, entry in beside)
        return BlockTransfer(nbytes, len(path), False, [chain for chain in chains if chain])

    def adopt(self, record: RequestRecord, transfer: BlockTransfer, now: float) -> None:
        """Insert fetched blocks that a request is about to read, with a full TTL."""
        self.take_over(transfer.chains, now)
        for tier_index in self._cache.tiers.indexes:
            tier_index.prolong(record.hashes, self._ttl, now)

    def holds(self, chain: Sequence[Entry], now: float) -> bool:
        """Return True if all of a chain is in memory."""
        return len(self._found([entry.key for entry in chain], now)) == len(chain)

    def take_over(self, chains: Sequence[Sequence[Entry]], now: float) -> None:
        """Keep chains, whose times are seconds that are left, as far as they fit."""
        for chain in chains:
            known = {
                entry.key: Span(entry.key, entry.end - entry.tokens, entry.end, not entry.tokens) for entry in chain
            }
            steps = self._cache.tiers.adopt([_moved(entry, now) for entry in chain], now)
            self._note(((step, known.get(step.key) if isinstance(step, Stored) else None) for step in steps), now)

    def hottest(self, most: int, now: float) -> list[list[Entry]]:
        """Return chains in memory, what would be evicted last first, together at most so many bytes.

        Of the chain that does not fit there is the beginning.
        """
        chains: list[list[Entry]] = []
        taken: set[Key] = set()
        for end in (end for tier_index in self._memory for end in tier_index.by_worth()):
            chain = self._found([entry.key for entry in end.path()], now)
            for held, entry in enumerate(chain):
                if entry.key in taken:
                    continue
                most -= entry.size
                if most < 0:
                    return [*chains, chain[:held]] if held else chains
                taken.add(entry.key)
            if chain:
                chains.append(chain)
        return chains

    def _found(self, keys: Sequence[Key], now: float) -> list[Entry]:
        """Return entries in memory of the leading keys of a chain."""
        found = []
        for key in keys:
            if (entry := self._entry(key, now)) is None:
                break
            found.append(entry)
        return found

    def _entry(self, key: Key, now: float) -> Entry | None:
        """Return an unexpired entry in memory, of the fastest tier that has it, with remaining times."""
        for tier_index in self._memory:
            if key in tier_index and (entry := tier_index.entry(key)) is not None:
                return _moved(entry, -now) if entry.expires_at > now else None
        return None

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
        for tier, tier_index in enumerate(self._cache.tiers.indexes):
            if (difference := tier_index.bytes - self._known[tier]) != 0:
                self._known[tier] += difference
                self._levels[tier].change(difference, now)
                total += difference
        if total:
            self._stored.change(total, now)

    def drop(self, now: float) -> None:
        """Drop everything: the replica is gone."""
        self._index.drop_replica(self._replica)
        for level, known in zip(self._levels, self._known, strict=True):
            level.change(-known, now)
        self._stored.change(-sum(self._known), now)
        self._known = [0] * len(self._known)

    def _tell(self, key: Key, tier: str | None, now: float) -> None:
        """Report the fastest tier that has a block, or None if it was dropped."""
        if tier is None:
            self._index.remove(self._replica, (key,))
        else:
            self._index.add(self._replica, (key,), tier)
        if self._late is not None:
            self._late.happened(self._replica, (key,), tier, now)


def _moved(entry: Entry, by: float) -> Entry:
    """Copy an entry, in no index, with times shifted by `by`."""
    life, mark = entry.expires_at + by, entry.mark_expires_at + by
    return replace(entry, parent=None, expires_at=life, mark_expires_at=mark, pins=0, children=0)

"""How long prefix blocks live and which goes first. The replica's block store and the simulator run this same code.

The ledger knows keys, sizes and times, not tensors. Time is an argument of every call: seconds on any clock that
never goes back.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """A stored block or partial tail."""

    key: bytes
    size: int  # bytes
    ttl: float  # seconds of life after each read
    expires_at: float
    pins: int = 0  # requests that are reading it; never evicted or expired while above 0
    mark_ttl: float = 0.0  # above 0 where a breakpoint was written: its own lifetime, refreshed by reads
    mark_expires_at: float = -math.inf
    deadline: float = math.inf  # where it stands in the ledger's heap of deadlines; inf if it does not


@dataclass(frozen=True, slots=True)
class Admission:
    """What storing a chain did: keys now resident that were not, and keys that gave way."""

    stored: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


class BlockLedger:
    """Which blocks are resident: TTL with sliding refresh, least recently used first, within a byte limit.

    Chains are touched from their end to their start, so the least recently used entry is always the end of a chain,
    and a parent lives at least as long as its children: presence stays prefix-closed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._deadlines: list[tuple[float, bytes]] = []  # counts only where the entry's own deadline agrees

    @property
    def next_deadline(self) -> float:
        """No entry expires before this time; infinite if none ever does."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        """Keys, the least recently used first."""
        return iter(self._entries)

    def match(self, chain: Sequence[bytes], now: float) -> int:
        """Leading keys of `chain` that are resident and alive."""
        for count, key in enumerate(chain):
            entry = self._entries.get(key)
            if entry is None or (entry.expires_at <= now and not entry.pins):
                return count
        return len(chain)

    def has_mark(self, key: bytes, now: float) -> bool:
        """Whether a breakpoint was written at exactly this prefix and may still be read."""
        entry = self._entries.get(key)
        return entry is not None and entry.mark_expires_at > now

    def touch(self, chain: Sequence[bytes], now: float) -> None:
        """A read: every entry of the chain becomes recent and lives its TTL again, marks included."""
        entries = self._entries
        for key in reversed(chain):
            entry = entries[key]
            entries.move_to_end(key)
            entry.expires_at = max(entry.expires_at, now + entry.ttl)
            if entry.mark_expires_at > now:
                entry.mark_expires_at = now + entry.mark_ttl

    def mark(self, key: bytes, ttl: float, now: float) -> None:
        """Note that a breakpoint was written at this prefix; it is readable for `ttl` seconds after each use."""
        entry = self._entries[key]
        entry.mark_ttl = max(ttl, entry.mark_ttl if entry.mark_expires_at > now else 0.0)
        entry.mark_expires_at = now + entry.mark_ttl

    def store(self, chain: Sequence[bytes], sizes: Sequence[int], ttl: float, now: float) -> Admission:
        """Make a chain resident, evicting what is least recently used; its head is kept if not all of it fits.

        Entries already there are touched and live at least `ttl` longer. Nothing of the chain itself and nothing
        pinned is evicted. A parent must come before its children.
        """
        evicted = self.expire(now)
        present = self.match(chain, now)
        for key in chain[:present]:
            self._entries[key].ttl = max(self._entries[key].ttl, ttl)

        protected = set(chain)
        stored: list[bytes] = []
        for key, size in zip(chain[present:], sizes[present:], strict=True):
            if not self._make_room(size, protected, evicted):
                break
            self._entries[key] = entry = Entry(key, size, ttl, now + ttl)
            self._queue(entry)
            self.bytes += size
            stored.append(key)
        self.touch(chain[: present + len(stored)], now)
        return Admission(stored, evicted)

    def pin(self, chain: Sequence[bytes]) -> None:
        for key in chain:
            self._entries[key].pins += 1

    def unpin(self, chain: Sequence[bytes]) -> None:
        for key in chain:
            entry = self._entries[key]
            entry.pins -= 1
            if not entry.pins and entry.deadline == math.inf:  # its deadline passed while it was in use
                self._queue(entry)

    def expire(self, now: float) -> list[bytes]:
        """Remove what has outlived its TTL; the removed keys."""
        expired: list[bytes] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            entry = self._entries.get(key)
            if entry is None or entry.deadline != deadline:
                continue  # left behind by an entry that was evicted
            if entry.pins:
                entry.deadline = math.inf
            elif entry.expires_at <= now:
                self._drop(key)
                expired.append(key)
            else:
                self._queue(entry)
        return expired

    def discard(self, keys: Sequence[bytes]) -> None:
        """Forget entries whose bytes could not be kept; what is pinned is not among them."""
        for key in keys:
            self._drop(key)

    def _queue(self, entry: Entry) -> None:
        entry.deadline = entry.expires_at
        if entry.deadline == math.inf:
            return
        heapq.heappush(self._deadlines, (entry.deadline, entry.key))
        if len(self._deadlines) > 2 * len(self._entries) + 64:  # evicted entries leave their deadlines behind
            self._deadlines = [(e.deadline, e.key) for e in self._entries.values() if e.deadline < math.inf]
            heapq.heapify(self._deadlines)

    def _make_room(self, size: int, protected: set[bytes], evicted: list[bytes]) -> bool:
        if self.bytes + size <= self.capacity:
            return True
        victims, freed = [], 0
        for key, entry in self._entries.items():
            if entry.pins or key in protected:
                continue
            victims.append(key)
            freed += entry.size
            if self.bytes - freed + size <= self.capacity:
                for victim in victims:
                    self._drop(victim)
                evicted.extend(victims)
                return True
        return False

    def _drop(self, key: bytes) -> None:
        self.bytes -= self._entries.pop(key).size

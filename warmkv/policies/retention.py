"""How long prefix blocks live and which goes first. The replica's block store and the simulator run this same code.

An index knows the keys, sizes and times of one tier, not tensors. Time is an argument of every call: seconds on any
clock that never goes back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from warmkv.policies.entry import LOST, Entry, StoreOutcome
from warmkv.policies.eviction import Order, Reuse, lru
from warmkv.policies.heaps import LazyHeap

Life = tuple[float, float, float, float, int, float]
"""`ttl`, `expires_at`, `mark_ttl`, `mark_expires_at`, `reads` and `used_at` of an entry."""


def as_it_is(plain: int, tokens: int) -> int:
    return plain


class TierIndex:
    """Which blocks a tier holds: TTL with sliding refresh, and an order of eviction, within a byte limit.

    Only the end of a chain without readers is ever evicted, so presence is prefix-closed under every
    order. A parent lives at least as long as its children. Every operation on a block takes O(log n).

    `weigh(plain bytes, tokens)` is what a block takes here. With `share` above 0 every tenant has that share of the
    capacity reserved: no other tenant can evict it below. Beyond that, the tenant that holds most is evicted first.
    """

    def __init__(
        self,
        capacity: int,
        order: Order = lru,
        *,
        weigh: Callable[[int, int], int] = as_it_is,
        share: float = 0.0,
    ) -> None:
        self.capacity, self.quota = capacity, int(share * capacity)
        self.bytes = 0
        self._order, self._weigh, self._apart = order, weigh, share > 0
        self._reuse = Reuse()
        self._entries: dict[bytes, Entry] = {}
        self._floor = 0.0
        self._pinned = 0  # bytes that cannot be evicted
        self._ticks = 0
        self._deadlines: LazyHeap[bytes] = LazyHeap()  # of ends of chains without readers; no other can expire first
        self._ends: defaultdict[str, LazyHeap[bytes]] = defaultdict(LazyHeap)  # the same, by tenant, as they are to go
        self._held: defaultdict[str, int] = defaultdict(int)  # bytes by tenant, where tenants are told apart
        self._largest: LazyHeap[str] = LazyHeap()  # tenants, those that hold most first

    @property
    def next_deadline(self) -> float:
        """Return the earliest time at which an entry can expire; infinite if none ever does."""
        first = self._deadlines.first()
        return first[0][0] if first else math.inf

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes that requests are reading."""
        return self._pinned

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.expires_at != LOST

    def __iter__(self) -> Iterator[bytes]:
        """Yield keys that can be found, the least recently used first."""
        held = (entry for entry in self._entries.values() if entry.expires_at != LOST)
        return (entry.key for entry in sorted(held, key=lambda entry: entry.used))

    def entry(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def bytes_of(self, tenant: str) -> int:
        """Return bytes that a tenant holds here."""
        if self._apart:
            return self._held.get(tenant, 0)
        return sum(entry.size for entry in self._entries.values() if entry.tenant == tenant)

    # --- reading

    def match(self, chain: Sequence[bytes], now: float) -> int:
        """Return leading keys of `chain` that are held and alive."""
        find = self._entries.get
        for count, key in enumerate(chain):
            entry = find(key)
            if entry is None or not (entry.expires_at > now or (entry.pins and entry.expires_at != LOST)):
                return count
        return len(chain)

    def has_mark(self, key: bytes, now: float) -> bool:
        """Return True if a breakpoint was written at exactly this prefix and may still be read."""
        entry = self._entries.get(key)
        return entry is not None and entry.mark_expires_at > now

    def touch(self, chain: Sequence[bytes], now: float) -> None:
        """Refresh recency and TTL of what is held of a chain, marks included."""
        entries, read = self._held_of(chain), self._reuse.read
        for entry in entries:
            read(entry)
            entry.reads += 1
            if entry.mark_expires_at > now:
                entry.mark_expires_at = max(entry.mark_expires_at, now + entry.mark_ttl)
        self._refresh(entries, now)

    def mark(self, key: bytes, ttl: float, now: float) -> None:
        """Note that a breakpoint was written at this prefix; it is readable for `ttl` seconds after each use."""
        entry = self._entries[key]
        entry.mark_ttl = max(ttl, entry.mark_ttl if entry.mark_expires_at > now else 0.0)
        entry.mark_expires_at = max(entry.mark_expires_at, now + entry.mark_ttl)

    def pin(self, chain: Sequence[bytes]) -> list[Entry]:
        """Keep what is held of a chain until `unpin` of what is returned."""
        return self._pin(self._held_of(chain))

    def _held_of(self, chain: Sequence[bytes]) -> list[Entry]:
        find = self._entries.get
        return [entry for key in chain if (entry := find(key)) is not None and entry.expires_at != LOST]

    def _pin(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            if not entry.pins:
                self._pinned += entry.size
                if not entry.children:
                    self._hold(entry)
            entry.pins += 1
        return entries

    def unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.pins -= 1
            if not entry.pins:
                self._pinned -= entry.size
                if not entry.children:
                    self._free(entry)

    # --- writing

    def store(
        self,
        chain: Sequence[bytes],
        sizes: Sequence[int],
        ttl: float,
        now: float,
        *,
        tokens: Sequence[int] | None = None,
        tenant: str = "",
    ) -> StoreOutcome:
        """Insert a chain, evicting in order; keep the longest prefix that fits.

        `sizes` are plain bytes, `tokens` those in each block (1 each if left out). Entries already there live at least
        `ttl` longer. Nothing of the chain itself and nothing pinned is evicted. A parent comes before its children.
        """
        expired = self.expire(now)
        self.prolong(chain, ttl, now)
        life = (ttl, now + ttl, 0.0, -math.inf, 0, now)
        held, admission = self._admit(
            chain, sizes, tokens or [1] * len(chain), tenant, now, lambda at: life, StoreOutcome(expired=expired)
        )
        self._refresh(held, now)
        return admission

    def adopt(self, path: Sequence[Entry], now: float) -> StoreOutcome:
        """Hold a chain as another tier or replica has it, with the life that it has there: it was moved, not read.

        What is here of it already lives as long as what comes behind it.
        """

        def life(at: int) -> Life:
            entry = path[at]
            return entry.ttl, entry.expires_at, entry.mark_ttl, entry.mark_expires_at, entry.reads, entry.used_at

        held, admission = self._admit(
            [entry.key for entry in path],
            [entry.plain for entry in path],
            [entry.tokens for entry in path],
            path[0].tenant,
            now,
            life,
            StoreOutcome(expired=self.expire(now)),
        )
        ttl, expires_at = 0.0, LOST
        for entry in reversed(held):
            entry.ttl = ttl = max(ttl, entry.ttl)
            entry.expires_at = expires_at = max(expires_at, entry.expires_at)
            self._free(entry)
        self._use(held)
        return admission

    def inherit(self, key: bytes, other: Entry) -> None:
        """Give an entry the lifetimes that the same block has in another tier, where these are longer."""
        entry = self._entries[key]
        entry.ttl, entry.expires_at = max(entry.ttl, other.ttl), max(entry.expires_at, other.expires_at)
        if other.mark_expires_at > entry.mark_expires_at:
            entry.mark_ttl, entry.mark_expires_at = other.mark_ttl, other.mark_expires_at
        entry.reads = max(entry.reads, other.reads)
        self._free(entry)

    def prolong(self, chain: Sequence[bytes], ttl: float, now: float) -> None:
        """Let what is held of a chain live at least `ttl` seconds from now, and its own TTL where that is longer."""
        for key in chain[: self.match(chain, now)]:
            entry = self._entries[key]
            entry.ttl = max(entry.ttl, ttl)
            entry.expires_at = max(entry.expires_at, now + entry.ttl)
            if not entry.children:
                self._free(entry)

    def restore(self, entry: Entry, parent: bytes | None) -> bool:
        """Take up an entry from elsewhere behind `parent`; False, and nothing is done, without parent or room."""
        before = self._entries.get(parent) if parent is not None else None
        size = self._weigh(entry.plain, entry.tokens)
        fits = self.bytes + size <= self.capacity and entry.key not in self._entries
        if not fits or (parent is not None and before is None):
            return False
        life = (entry.ttl, entry.expires_at, entry.mark_ttl, entry.mark_expires_at, entry.reads, entry.used_at)
        added = self._add(entry.key, before, entry.plain, size, entry.tokens, entry.tenant, life)
        self._use([added])
        return True

    def restore_all(self, entries: Iterable[tuple[Entry, bytes | None]]) -> None:
        """Take up entries with their parents' keys as `restore` does, the most recently used first."""
        added = [self._entries[entry.key] for entry, parent in entries if self.restore(entry, parent)]
        self._use(added)

    # --- leaving

    def expire(self, now: float) -> list[Entry]:
        """Remove what has outlived its TTL."""
        expired: list[Entry] = []
        while (first := self._deadlines.first()) and first[0][0] <= now:
            entry = self._entries[first[1]]
            self._remove(entry)
            expired.append(entry)
        return expired

    def lose(self, key: bytes) -> None:
        """Mark an entry and all that follow it missing until they are stored again."""
        entry = self._entries.get(key)
        if entry is None or entry.expires_at == LOST:
            return
        self._resize(entry, 0)
        entry.expires_at = entry.mark_expires_at = LOST
        at: Entry | None = entry
        while at is not None and at.expires_at == LOST and not at.pins and not at.children:
            self._remove(at)
            at = at.parent

    def keys_of(self, tenant: str | None = None) -> list[bytes]:
        """Return keys that can be found, of one tenant if it is given, in no order. Takes O(n)."""
        return [
            entry.key
            for entry in self._entries.values()
            if entry.expires_at != LOST and (tenant is None or entry.tenant == tenant)
        ]

    def by_worth(self) -> list[Entry]:
        """Return the ends of resident chains, in reverse order of eviction. O(n log n)."""
        ends = [entry for entry in self._entries.values() if not entry.children and entry.expires_at != LOST]
        return sorted(ends, key=lambda entry: self._order(entry, self._reuse), reverse=True)

    # --- inside

    def _admit(
        self,
        chain: Sequence[bytes],
        sizes: Sequence[int],
        tokens: Sequence[int],
        tenant: str,
        now: float,
        life: Callable[[int], Life],
        admission: StoreOutcome,
    ) -> tuple[list[Entry], StoreOutcome]:
        """Insert as much of a chain as fits, and return the outcome.

        The chain is pinned meanwhile, so as not to evict itself.
        """
        present = self.match(chain, now)
        held = self._pin([self._entries[key] for key in chain[:present]])
        for at in range(present, len(chain)):
            key, size = chain[at], self._weigh(sizes[at], tokens[at])
            entry = self._entries.get(key)  # there, but not alive: others need it as their parent
            again = self._pin([entry]) if entry is not None else []
            if not self._make_room(size - (entry.size if entry else 0), tenant, admission.evicted):
                self.unpin(again)
                break
            if entry is None:
                entry = self._add(key, held[-1] if held else None, sizes[at], size, tokens[at], tenant, life(at))
                entry.since = now
                again = self._pin([entry])
                admission.stored.append(key)
            else:
                if entry.expires_at == LOST:
                    self._resize(entry, size)
                    entry.since = now
                    admission.stored.append(key)
                entry.ttl, entry.expires_at, entry.mark_ttl, entry.mark_expires_at, _, entry.used_at = life(at)
            held += again
        self.unpin(held)
        return held, admission

    def _add(
        self,
        key: bytes,
        parent: Entry | None,
        plain: int,
        size: int,
        tokens: int,
        tenant: str,
        life: Life,
    ) -> Entry:
        end = tokens + (parent.end if parent is not None else 0)
        entry = self._entries[key] = Entry(key, parent, plain, 0, tokens, end, tenant, *life)
        self._resize(entry, size)
        if parent is not None:
            if not parent.children and not parent.pins:
                self._hold(parent)
            parent.children += 1
        return entry

    def _remove(self, entry: Entry) -> None:
        self._reuse.left(entry)
        self._hold(entry)
        size = entry.size
        self._resize(entry, 0)
        entry.size = size  # whoever hears of it may want to know
        del self._entries[entry.key]
        if entry.parent is not None:
            entry.parent.children -= 1
            self._free(entry.parent)

    def _resize(self, entry: Entry, size: int) -> None:
        grown = size - entry.size
        entry.size = size
        self.bytes += grown
        if entry.pins:
            self._pinned += grown
        if self._apart:
            held = self._held[entry.tenant] = self._held[entry.tenant] + grown
            if held:
                self._largest.set(entry.tenant, (-held,))
            else:
                del self._held[entry.tenant]
                self._largest.discard(entry.tenant)

    def _refresh(self, entries: list[Entry], now: float) -> None:
        for entry in entries:
            if (until := now + entry.ttl) > entry.expires_at:
                entry.expires_at = until
            entry.used_at = now
        self._use(entries)

    def _use(self, entries: list[Entry]) -> None:
        """Use a chain from its end to its start, so that a parent is always more recent than its children."""
        ticks, floor = self._ticks, self._floor
        for entry in reversed(entries):
            ticks += 1
            entry.used, entry.floor = ticks, floor
            if not entry.children:
                self._free(entry)
        self._ticks = ticks

    def _free(self, entry: Entry) -> None:
        """Make an entry evictable if it is the end of a chain without readers."""
        if entry.pins or entry.children:
            return
        self._ends[entry.tenant if self._apart else ""].set(entry.key, self._order(entry, self._reuse))
        if entry.expires_at < math.inf:
            self._deadlines.set(entry.key, (entry.expires_at,))

    def _hold(self, entry: Entry) -> None:
        self._ends[entry.tenant if self._apart else ""].discard(entry.key)
        self._deadlines.discard(entry.key)

    def _make_room(self, size: int, tenant: str, evicted: list[Entry]) -> bool:
        if self.bytes + size <= self.capacity:
            return True
        if self._pinned + size > self.capacity:
            return False
        while self.bytes + size > self.capacity:
            victim = self._victim(tenant, size) if self._apart else self._first("")
            if victim is None:
                return False
            self._floor = max(self._floor, self._order(victim, self._reuse)[0])
            self._remove(victim)
            evicted.append(victim)
        return True

    def _first(self, tenant: str) -> Entry | None:
        """Return the next entry to evict of a tenant."""
        ends = self._ends.get(tenant)
        first = ends.first() if ends else None
        return self._entries[first[1]] if first else None

    def _victim(self, tenant: str, size: int) -> Entry | None:
        """Choose who gives way: who holds most, down to its quota; `tenant`, who asks for `size` bytes, to nothing."""
        own, mine = self._first(tenant), self._held.get(tenant, 0) + size
        passed: list[str] = []  # nothing of theirs can go now
        victim = own
        while first := self._largest.first():
            largest = first[1]
            if self._held[largest] <= max(self.quota, mine if own else 0):
                break
            entry = self._first(largest)
            if entry is not None and (largest == tenant or self._held[largest] - entry.size >= self.quota):
                victim = entry
                break
            passed.append(largest)
            self._largest.discard(largest)
        for name in passed:
            self._largest.set(name, (-self._held[name],))
        return victim

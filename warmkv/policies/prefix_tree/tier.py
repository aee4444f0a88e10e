"""One tier of the tree: its bytes, the order in which ends of chains are evicted, and the shares of tenants."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict

from warmkv.policies.eviction import READS_APART, Reuse, lfu, lru
from warmkv.policies.heaps import LazyHeap
from warmkv.policies.prefix_tree.deadlines import Deadlines
from warmkv.policies.prefix_tree.nodes import Copy
from warmkv.policies.tiers import Tier

Evicted = list[tuple[Copy, int, int]]
"""What has left, how many blocks of its node the tier had held before, and how many of these, the last ones, left."""

Record = tuple[tuple[float, ...], int, Copy]
"""The priority that a copy's end had, the record's number, and the copy."""

ALIKE = (lru, lfu)
"""Orders in which all blocks of a node have one priority, which only rises with each use."""


class TierSpace:
    """The copies of one tier. Takes O(log n) for each copy that is evicted.

    `share` of the capacity is reserved for each tenant, which takes as long for each block; 0 for none.
    """

    def __init__(self, tier: Tier, share: float, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.tier, self.capacity, self.weigh = tier, tier.capacity, tier.weigh
        self.bytes = self.pinned = 0  # `pinned` bytes are being read
        self.evicted = self.expired = 0  # blocks, so far
        self.short = False  # whether there was not room for all at some time
        self._order, self._quota, self.apart = tier.order, int(share * tier.capacity), share > 0
        # A priority that only rises with each use is looked at again when its record surfaces, else at each use.
        self.eager = tier.order not in ALIKE
        self.reuse = Reuse()
        self._ends: defaultdict[str, list[Record]] = defaultdict(list)
        self._records = self._queued = 0  # made so far; copies that have one
        self._ticks = 0
        self._floor = 0.0
        self._held: defaultdict[str, int] = defaultdict(int)  # bytes by tenant, where these are apart
        self._largest: LazyHeap[str] = LazyHeap()

    # --- use

    def use(self, path: list[Copy]) -> None:
        """Make the copies of a path the most recent, from its end to its start: a parent goes after its children."""
        ticks, floor = self._ticks, self._floor
        for copy in reversed(path):
            ticks += 1
            copy.used, copy.floor = ticks, floor
        self._ticks = ticks
        end = path[-1]
        if not end.children and not end.pins:
            self.queue(end)

    def read(self, copy: Copy) -> None:
        """Note that the blocks of a copy are read, before that is counted in its node."""
        if self.eager:
            self.reuse.again[min(copy.node.reads, READS_APART - 1)] += copy.held

    def queue(self, copy: Copy) -> None:
        """Let the end of a copy be evicted and expire, if it may leave now."""
        if copy.children or copy.pins or copy.held <= copy.partly:
            return
        if (node := copy.node).expires < node.watched:
            self._deadlines.watch(node)
        if copy.queued:
            if not self.eager:
                return
        else:
            self._queued += 1
        ends = self._ends[copy.tenant if self.apart else ""]
        copy.queued = self._records = number = self._records + 1
        heapq.heappush(ends, (self._order(copy, self.reuse), number, copy))
        if len(ends) > 2 * self._queued + 64:
            ends[:] = [record for record in ends if record[2].queued == record[1]]
            heapq.heapify(ends)

    def unqueue(self, copy: Copy) -> None:
        """Forget a copy's record: it is out of date."""
        if copy.queued:
            copy.queued = 0
            self._queued -= 1

    # --- room

    def grow(self, copy: Copy, blocks: int, tenant: str) -> None:
        """Hold more blocks of a node."""
        if not copy.held:
            copy.tenant = tenant
            if copy.parent is not None:
                copy.parent.children += 1
        copy.held += blocks
        self.bytes += blocks * copy.size
        if self.apart:
            self._charge(copy.tenant, blocks * copy.size)

    def shorten(self, copy: Copy, blocks: int) -> None:
        """Hold fewer blocks of a node."""
        if self.eager:
            self.reuse.never[min(copy.node.reads, READS_APART - 1)] += blocks
        copy.held -= blocks
        self.bytes -= blocks * copy.size
        if self.apart:
            self._charge(copy.tenant, -blocks * copy.size)
        if copy.held:
            self.queue(copy)
            return
        if copy.queued:
            self.unqueue(copy)
        if (parent := copy.parent) is not None:
            parent.children -= 1
            if not parent.children and not parent.pins:
                self.queue(parent)

    def expire(self, copy: Copy, until: float, expired: Evicted) -> None:
        """Drop the end of a copy if it has outlived its TTL by then, and the ends before it that this sets free."""
        end: Copy | None = copy
        while end is not None and end.node.expires <= until and (gone := end.loose) > 0:
            self.expired += gone
            expired.append((end, end.held, gone))
            if self.eager or gone < end.held:  # priorities depend on what has left before
                self.shorten(end, gone)
                return
            end.held = 0
            self.bytes -= gone * end.size
            if self.apart:
                self._charge(end.tenant, -gone * end.size)
            if end.queued:
                self.unqueue(end)
            if (end := end.parent) is not None:
                end.children -= 1
        if end is not None and end is not copy:
            self.queue(end)

    def give_up(self, copy: Copy) -> None:
        """Hold nothing of a node any more, readers or not: its copy is theirs alone from now on.

        What is behind it goes after it.
        """
        if self.eager:
            self.reuse.never[min(copy.node.reads, READS_APART - 1)] += copy.held
        self.bytes -= copy.held * copy.size
        self.pinned -= copy.pinned * copy.size
        self.evicted += copy.held
        if self.apart and copy.held:
            self._charge(copy.tenant, -copy.held * copy.size)
        self.unqueue(copy)
        if copy.held and (parent := copy.parent) is not None:
            parent.children -= 1
            self.queue(parent)
        copy.held = copy.size = 0  # so that letting it go counts for nothing

    def _charge(self, tenant: str, grown: int) -> None:
        """Count the bytes of a tenant."""
        held = self._held[tenant] = self._held[tenant] + grown
        if held:
            self._largest.set(tenant, (-held,))
        else:
            del self._held[tenant]
            self._largest.discard(tenant)

    def admit(self, path: list[Copy], blocks: int, tenant: str, evicted: Evicted) -> int:
        """Hold `blocks` more of the last node of a path, or as many as fit, evicting in order; return how many.

        The path itself stays. Nothing is evicted for blocks that cannot fit.
        """
        copy = path[-1]
        size, room = copy.size, self.capacity - self.bytes
        if blocks * size > room:
            self.short = True
            fixed = self.pinned + sum([(each.held - each.pinned) * each.size for each in path if each.held])
            blocks = min(blocks, (self.capacity - fixed) // size) if size else blocks
            guard = copy if copy.held else copy.parent
            if self.apart:
                return self._admit_apart(copy, guard, blocks, tenant, evicted)
            if blocks <= 0:
                return 0
            self._evict(blocks * size - room, guard, evicted)
        self.grow(copy, blocks, tenant)
        return blocks

    def _evict(self, missing: int, guard: Copy | None, evicted: Evicted) -> None:
        """Free `missing` bytes of what is loose, but not of `guard`."""
        while missing > 0:
            first = self._first("", guard)
            assert first is not None  # there is room, since only `fixed` bytes stay
            found = first[2]
            gone = min(found.loose, -(-missing // found.size))
            if self.eager and gone > 1:
                gone = self._before_others(found, gone, guard)
            missing -= gone * found.size
            self._drop(found, gone, evicted)

    def _before_others(self, copy: Copy, most: int, guard: Copy | None) -> int:
        """Count the blocks at the end of a copy, at most `most`, that go before any other copy's.

        Along a run priorities rise or fall throughout.
        """
        self.unqueue(copy)
        following = self._first("", guard)
        if following is None:
            return most
        if self._priority_behind(copy, 1) > following[0]:
            return 1
        behind = range(1, most)  # blocks that are gone before the second, the third and so on
        return 1 + bisect_left(behind, True, key=lambda gone: self._priority_behind(copy, gone) > following[0])

    def _priority_behind(self, copy: Copy, gone: int) -> tuple[float, ...]:
        """Return the priority of a copy's end once so many of its blocks are gone."""
        reads = min(copy.node.reads, READS_APART - 1)
        copy.held -= gone
        self.reuse.never[reads] += gone
        priority = self._order(copy, self.reuse)
        copy.held += gone
        self.reuse.never[reads] -= gone
        return priority

    def _drop(self, copy: Copy, blocks: int, evicted: Evicted) -> None:
        self._floor = max(self._floor, self._order(copy, self.reuse)[0])
        if self.eager and blocks > 1:
            self._floor = max(self._floor, self._priority_behind(copy, blocks - 1)[0])
        evicted.append((copy, copy.held, blocks))
        self.evicted += blocks
        self.shorten(copy, blocks)

    def _first(self, tenant: str, guard: Copy | None) -> Record | None:
        """Return the record of the copy whose end is to be evicted next of a tenant; never `guard`."""
        ends = self._ends.get(tenant)
        kept = None
        found = None
        while ends:
            record = ends[0]
            copy = record[2]
            if copy.queued != record[1]:
                heapq.heappop(ends)
            elif copy.loose <= 0:
                self.unqueue(copy)  # until it can go
                heapq.heappop(ends)
            elif not self.eager and (priority := self._order(copy, self.reuse)) != record[0]:
                heapq.heapreplace(ends, (priority, record[1], copy))
            elif copy is guard:
                kept = heapq.heappop(ends)
            else:
                found = record
                break
        if kept is not None and ends is not None:
            heapq.heappush(ends, kept)
        return found

    # --- tenants

    def _admit_apart(self, copy: Copy, guard: Copy | None, blocks: int, tenant: str, evicted: Evicted) -> int:
        size, came = copy.size, 0
        while came < blocks:
            while self.bytes + size > self.capacity:
                victim = self._victim(tenant, size, guard)
                if victim is None:
                    return came
                self._drop(victim[2], 1, evicted)
            self.grow(copy, 1, tenant)
            guard = copy
            came += 1
        return came

    def _victim(self, tenant: str, size: int, guard: Copy | None) -> Record | None:
        """Choose who gives way: who holds most, down to its share; `tenant`, who asks for `size` bytes, to nothing."""
        own, mine = self._first(tenant, guard), self._held.get(tenant, 0) + size
        passed: list[str] = []  # nothing of theirs can go now
        victim = own
        while first := self._largest.first():
            largest = first[1]
            if self._held[largest] <= max(self._quota, mine if own else 0):
                break
            found = self._first(largest, guard)
            if found is not None and (largest == tenant or self._held[largest] - found[2].size >= self._quota):
                victim = found
                break
            passed.append(largest)
            self._largest.discard(largest)
        for name in passed:
            self._largest.set(name, (-self._held[name],))
        return victim

    # --- in order

    def by_worth(self, copies: list[Copy]) -> list[Copy]:
        """Return the ends of chains among copies, what would be evicted last first."""
        return sorted(
            [copy for copy in copies if not copy.children], key=lambda copy: self._order(copy, self.reuse), reverse=True
        )

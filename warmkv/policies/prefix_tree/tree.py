"""The prefix tree of one replica: what is found, kept, moved between tiers and given up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from warmkv.policies.eviction import CostAware, lfu
from warmkv.policies.prefix_tree.deadlines import Deadlines
from warmkv.policies.prefix_tree.held import Change, Copied, HeldRun, Left, Stored, run_of
from warmkv.policies.prefix_tree.nodes import EXPIRED, Copy, Node
from warmkv.policies.prefix_tree.tier import Evicted, TierSpace
from warmkv.policies.tiers import Tier

Path = list[Node]
Life = tuple[float, float, float, float, int]
"""`ttl`, `expires`, `mark_ttl`, `mark_expires` and `reads` of blocks."""


class Reading:
    """What a request reads: the last copy on its path in every tier. Pinned until `PrefixTree.release`."""

    __slots__ = ("ends",)

    def __init__(self) -> None:
        self.ends: list[Copy | None] = []


class PrefixTree:
    """Nodes of one replica in its tiers, fastest first; they belong to whoever makes their paths. Not thread-safe.

    A path starts at the first block of a prompt. `last` is how many blocks of its last node are meant. `now` is seconds
    on a clock that never goes back. A path given to a method that inserts may have a node split: it then has both
    parts. `forget(node)` is told of a node that no tier holds any more.

    Where blocks have keys, `changes` has what came and left, in order, until it is cleared; `clock` is the time at
    which it comes. `trim(node, blocks)` is told of a node of which tiers hold only so many leading blocks any more,
    `divided(head, node)` of one whose leading blocks are `head` now.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        share: float,
        forget: Callable[[Node], None],
        trim: Callable[[Node, int], None] | None = None,
        divided: Callable[[Node, Node], None] | None = None,
    ) -> None:
        self.deadlines = Deadlines()
        self.spaces = [TierSpace(tier, share, self.deadlines) for tier in tiers]
        self.changes: list[Change] | None = None if divided is None else []
        self.clock = math.nan
        self._forget, self._trim, self._divided = forget, trim, divided
        self._counts = any(space.tier.order is lfu or isinstance(space.tier.order, CostAware) for space in self.spaces)
        self._eager = any(space.eager for space in self.spaces)
        self.changed: dict[Node, None] = {}  # nodes of which some tier holds more or less, since it was cleared
        self._shortened: list[Node] = []  # nodes of which some tier holds less

    def _settle(self) -> None:
        """Forget the nodes that are held nowhere, and marks at ends that are."""
        if not self._shortened:
            return
        for node in self._shortened:
            self.changed[node] = None
            span = node.span
            if span < node.length:
                node.mark_expires = EXPIRED
                if not span:
                    self.deadlines.forget(node)
                    self._forget(node)
                elif self._trim is not None:
                    self._trim(node, span)
        self._shortened.clear()

    # --- reading

    def read(self, path: Path, now: float) -> Reading:
        """Refresh what is held of a path in any tier, and pin it."""
        self.touch(path, now)
        return self.pin(path)

    def pin(self, path: Path, only: int | None = None) -> Reading:
        """Keep what is held of a path, in any tier or in one."""
        reading = Reading()
        for tier, space in enumerate(self.spaces):
            end = None
            for node in path if only is None or only == tier else ():
                copy = node.copies[tier]
                held = copy.held
                if held == node.length:
                    if not copy.pins:
                        space.pinned += (held - copy.partly) * copy.size
                    copy.pins += 1
                elif held:
                    before = copy.pinned
                    copy.read_part({**(copy.partial or {}), reading: held})
                    space.pinned += (copy.pinned - before) * copy.size
                else:
                    break
                end = copy
            reading.ends.append(end)
        return reading

    def release(self, reading: Reading) -> None:
        """Let go what a request read."""
        for space, end in zip(self.spaces, reading.ends, strict=True):
            copy = end
            while copy is not None:
                partly = copy.partly
                if copy.partial and reading in copy.partial:
                    copy.read_part({reader: part for reader, part in copy.partial.items() if reader is not reading})
                else:
                    partly = copy.node.length
                    copy.pins -= 1
                if not copy.pins:
                    space.pinned -= (partly - copy.partly) * copy.size
                    if copy.held and not copy.children:
                        space.queue(copy)
                copy = copy.parent
        reading.ends = []

    def touch(self, path: Path, now: float) -> None:
        """Refresh recency and lifetimes of what is held of a path, marks included."""
        for node in path:
            if now + node.ttl > node.expires:
                node.expires = now + node.ttl
            if node.mark_expires > now and now + node.mark_ttl > node.mark_expires:
                node.mark_expires = now + node.mark_ttl
        if self.changes is not None:
            for node in path:
                node.used_at = now
        if self._counts:
            for tier, space in enumerate(self.spaces):
                for node in path:
                    if node.copies[tier].held:
                        space.read(node.copies[tier])
            for node in path:
                node.reads += 1
        for tier, space in enumerate(self.spaces):
            if copies := [copy for node in path if (copy := node.copies[tier]).held]:
                space.use(copies)

    # --- writing

    def store(self, path: Path, ttl: float, now: float, tenant: str, last: int | None = None) -> bool:
        """Keep a computed path in the first tier, and in the next one as well if not all of it fits there.

        Returns True if a tier holds all of it.
        """
        self.prolong(path, ttl, now)
        life = (ttl, now + ttl, 0.0, EXPIRED, 0)
        if last is None:
            last = path[-1].length
        whole, tier = False, 0
        while not whole and tier < len(self.spaces):
            whole = self._insert(tier, path, last, tenant, life)
            tier += 1
        if self._eager:
            self._reconsider(path)
        if self.changes is not None:
            for node in path:
                node.used_at = now
        if self._shortened:
            self._settle()
        return whole

    def prolong(self, path: Path, ttl: float, now: float) -> None:
        """Let what is held of a path live at least `ttl` seconds from now, and from each use on."""
        for node in path:
            if node.expires == EXPIRED:
                break
            if ttl > node.ttl:
                node.ttl = ttl
            if now + node.ttl > node.expires:
                node.expires = now + node.ttl

    def _reconsider(self, path: Path) -> None:
        """Compute the priority of a path's end anew where it may depend on more than its own uses."""
        for tier, space in enumerate(self.spaces):
            if space.eager and (held := [copy for node in path if (copy := node.copies[tier]).held]):
                space.queue(held[-1])

    def mark(self, node: Node, ttl: float, at: float) -> None:
        """Note that a breakpoint was written at the end of a node; it is readable for `ttl` seconds after each use."""
        if node.span == node.length:
            if node.mark_expires <= at or ttl > node.mark_ttl:
                node.mark_ttl = ttl
            if at + node.mark_ttl > node.mark_expires:
                node.mark_expires = at + node.mark_ttl

    def promote(self, path: Path, last: int) -> None:
        """Keep in the first tier what was found further down."""
        if _held(path, last):
            return
        lowest = next(copy for copy in reversed(path[0].copies) if copy.held)
        self._insert(0, path, last, lowest.tenant, None)
        self._settle()

    def copy_down(self, source: int, tier: int, path: Path, last: int) -> None:
        """Keep in a lower tier, too, what one holds of a path."""
        self._insert(tier, path, last, path[0].copies[source].tenant, None, source)
        self._settle()

    def adopt(self, parts: Callable[[], Iterable[tuple[Path, int, Life]]], tenant: str) -> None:
        """Keep a chain that another replica has, with the lives that it has there; where, as `store` says.

        It comes in parts of one life each, every one with the path up to its end, which is asked for when it is needed.
        """
        for tier in range(len(self.spaces)):
            if all(self._insert(tier, path, last, tenant, life) for path, last, life in parts()):
                break
        for path, _, _ in parts():
            _outlive(path)
        self._settle()

    def cut(self, path: Path, blocks: int) -> Path:
        """Return the path of the leading blocks of a prompt, splitting a node if they end within it."""
        for at, node in enumerate(path):
            if blocks <= node.length:
                if blocks < node.length:
                    path[at : at + 1] = [self.split(node, blocks), node]
                return path[: at + 1]
            blocks -= node.length
        return path

    def restore(self, tier: int, path: Path, place: int, tenant: str, life: Life) -> bool:
        """Take up the block number `place` of a path's last node, from 1 on; False without room or the one before it.

        `order` is to follow. A path whose last node has to be split for that then ends with the latter part.
        """
        node, space = path[-1], self.spaces[tier]
        copy = node.copies[tier]
        before = node.parent is None or node.parent.copies[tier].held == node.parent.length
        if space.bytes + copy.size > space.capacity:
            space.short = True
            return False
        if copy.held != place - 1 or not before:
            return False
        span = node.span
        space.grow(copy, 1, tenant)
        self.changed[node] = None
        if copy.held > span and (head := self._begin(node, span, life)) is not None:
            path.insert(-1, head)
        if self.changes is not None:
            self._came(tier, node, 1, None)
        return True

    def order(self, tier: int, copies: list[Copy]) -> None:
        """Let copies that were restored be used, the most recent first."""
        if copies:
            self.spaces[tier].use(copies)
        for copy in copies:
            part: Copy | None = copy
            while part is not None:  # parts of a run that was split
                self.spaces[tier].queue(part)
                part = part.parent

    def _insert(
        self, tier: int, path: Path, last: int, tenant: str, life: Life | None, source: int | None = None
    ) -> bool:
        """Hold a path in a tier as far as it fits, as its most recent; return True if all of it is held.

        Blocks that no tier held have that `life`; without one they are on their way, from `source` if it is not from
        below, and keep theirs. What gives way moves down a tier, with the path before it.
        """
        space, told = self.spaces[tier], self.changes
        evicted: Evicted = []
        begun = len(told) if told is not None else 0
        copies: list[Copy] = []
        whole, at, count = True, 0, len(path)
        while at < count and whole:
            node = path[at]
            at += 1
            copy = node.copies[tier]
            held = copy.held
            if (blocks := (node.length if at < count else last) - held) > 0:
                if space.apart and held and copy.tenant != tenant:
                    last -= held if at == count else 0
                    at -= 1
                    path[at : at + 1] = [self.split(node, held), node]
                    count += 1
                    continue
                span = node.span
                if blocks * copy.size <= space.capacity - space.bytes:
                    space.grow(copy, blocks, tenant)
                else:
                    came = space.admit([*copies, copy], blocks, tenant, evicted)
                    whole, blocks = came == blocks, came
                if blocks:
                    self.changed[node] = None
                    if life is not None and copy.held > span and (head := self._begin(node, span, life)) is not None:
                        path.insert(at - 1, head)
                        copies.append(head.copies[tier])
                        at += 1
                        count += 1
                    if told is not None:
                        self._came(tier, node, blocks, source)
            if copy.held:
                copies.append(copy)
        if copies:
            space.use(copies)
        if evicted:
            came = len(told) if told is not None else 0
            self._demote(tier, evicted)
            if told is not None:  # there is room before anything comes
                told[begun:] = [*told[came:], *told[begun:came]]
        return whole

    def _begin(self, node: Node, span: int, life: Life) -> Node | None:
        """Set the life of blocks that are new behind the first `span`; return what was split off for that."""
        ttl, expires, mark_ttl, mark_expires, reads = life
        head = None
        if span and (node.ttl != ttl or node.expires != expires or (self._counts and node.reads != reads)):
            head = self.split(node, span)
        node.ttl, node.expires, node.reads = ttl, expires, reads
        node.mark_ttl, node.mark_expires = mark_ttl, mark_expires
        return head

    def split(self, node: Node, blocks: int) -> Node:
        """Make the leading blocks of a node, which is not all of them, a node of their own; return it."""
        head = node.split(blocks)
        if self._divided is not None:
            self._divided(head, node)
        for space, first, copy in zip(self.spaces, head.copies, node.copies, strict=True):
            space.unqueue(copy)
            space.queue(copy)
            space.queue(first)
        return head

    def _demote(self, tier: int, evicted: Evicted) -> None:
        """Keep in the next tier what this one evicted, together with the path before it."""
        left = self._runs(evicted)
        for copy, blocks, _ in evicted:
            node = copy.node
            self._shortened.append(node)
            if tier + 1 < len(self.spaces) and node.copies[tier + 1].held < blocks:
                path = node.path()
                self._insert(tier + 1, path, blocks, path[0].copies[tier].tenant, None, tier)
        if self.changes is not None:
            self.changes += [Left(run, tier, "evicted") for run in left]

    # --- what is told

    def _runs(self, gone: Evicted) -> list[HeldRun]:
        """Return what has left, where that is told."""
        if self.changes is None:
            return []
        return [run_of(copy, held - blocks, held) for copy, held, blocks in gone]

    def _came(self, tier: int, node: Node, blocks: int, source: int | None) -> None:
        """Tell of the last blocks that a tier holds of a path up to a node: those that came."""
        changes, part = self.changes, node
        assert changes is not None
        parts: list[Change] = []
        while blocks > 0:
            copy = part.copies[tier]
            copy.since = self.clock
            count = min(blocks, copy.held)
            run = run_of(copy, copy.held - count, copy.held)
            parts.append(Stored(run, tier) if source is None else Copied(run, source, tier))
            blocks -= count
            if blocks:  # the node was split meanwhile
                assert part.parent is not None
                part = part.parent
        changes += reversed(parts)

    # --- leaving

    def drop(self, node: Node, blocks: int, tier: int = 0) -> None:
        """Evict the last blocks that a tier holds of a node, which nothing pins and nothing is held behind."""
        space, copy = self.spaces[tier], node.copies[tier]
        space.evicted += blocks
        if self.changes is not None:
            self.changes.append(Left(run_of(copy, copy.held - blocks, copy.held), tier, "dropped"))
        space.shorten(copy, blocks)
        self._shortened.append(node)
        self._settle()

    def expire(self, until: float) -> None:
        """Drop what has outlived its TTL by then."""
        expired: Evicted = []
        while (node := self.deadlines.pop(until)) is not None:
            for tier, copy in enumerate(node.copies):  # none if it was dropped
                self.spaces[tier].expire(copy, until, expired)
                if expired:
                    if self.changes is not None:
                        self.changes += [Left(run, tier, "expired") for run in self._runs(expired)]
                    self._shortened += [copy.node for copy, _, _ in expired]
                    expired.clear()
        self._settle()

    def lose(self, tier: int, behind: Sequence[Node]) -> None:
        """Give up all that a tier holds of a node and of all those behind it, each after its parent, readers or not."""
        space = self.spaces[tier]
        for node in behind:
            copy = node.copies[tier]
            if copy.held and self.changes is not None:
                self.changes.append(Left(run_of(copy, 0, copy.held), tier, "dropped"))
            self._shortened.append(node)
            before = node.parent.copies[tier] if node.parent is not None else None
            node.copies[tier] = Copy(node, before, copy.size)
            space.give_up(copy)
        self._settle()


def _outlive(path: Path) -> None:
    """Let every node of a path live as long as what is held behind it."""
    ttl, expires = 0.0, EXPIRED
    for node in reversed(path):
        if node.span:
            node.ttl = ttl = max(ttl, node.ttl)
            node.expires = expires = max(expires, node.expires)


def _held(path: Path, last: int) -> bool:
    """Return True if the first tier holds a path."""
    end = path[-1]
    for node in path:
        if node.copies[0].held < node.length and (node is not end or node.copies[0].held < last):
            return False
    return True

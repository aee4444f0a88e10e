"""The prefix blocks of one simulated replica: the prefix tree in virtual time, and what it adds up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes, sum_positions
from warmkv.policies.prefix_tree.nodes import Copy, Node
from warmkv.policies.prefix_tree.tree import PrefixTree, Reading
from warmkv.policies.tiers import Tier, most_blocks
from warmkv.prefixes.index import TIERS, Depths
from warmkv.prefixes.record import Mark
from warmkv.simulator.cache.chains import BlockTransfer, Chain, Chains, numbers
from warmkv.simulator.cache.late_index import LateIndex
from warmkv.simulator.cache.layout import NONE, Layout, Prompt, Runs
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.nodes import Nodes, leading, parts_of, upto

Name = tuple[int, int]
"""A full block: its run, and its place there."""


@dataclass(slots=True)
class Removals:
    """Count blocks and tails that left a tier, and why; `short` tells that a tier once had not room for all."""

    evicted: int = 0
    expired: int = 0
    short: bool = False


@dataclass(slots=True, eq=False)
class Found:
    """What is warm of a prompt. It is pinned until `ReplicaCache.release`."""

    hit: int = 0  # position of the highest breakpoint that may be read; 0 if none
    blocks: int = 0  # leading full blocks that are resident
    tokens: int = 0  # leading tokens whose KV is resident, a tail included
    tail: Node | None = field(default=None, repr=False)
    reading: Reading | None = field(default=None, repr=False)


NOTHING = Found()
NOWHERE: Depths = (0, 0, 0)


class ReplicaCache:
    """Blocks of one replica in its tiers. Times are virtual seconds. Prompts are those of the layout.

    `stored` and, tier by tier, `by_tier` are told of all bytes that come and go, `late`, if there is one, of how much
    of which runs is held. What moves down is there at once; what reading from a lower tier takes is the replica's
    matter.
    """

    def __init__(
        self,
        replica: str,
        layout: Layout,
        tiers: Sequence[Tier],
        token_bytes: int,
        lifetimes: Lifetimes,
        stored: TimeWeightedGauge,
        removals: Removals,
        share: float = 0.0,
        by_tier: Sequence[TimeWeightedGauge] = (),
        late: LateIndex | None = None,
    ) -> None:
        self._replica, self._layout, self._token_bytes = replica, layout, token_bytes
        self.lifetimes = lifetimes  # of what is stored from now on
        self._stored, self._removals, self._late = stored, removals, late
        self._levels = by_tier or [TimeWeightedGauge() for _ in tiers]
        self._nodes = Nodes(layout, tiers, token_bytes)
        self._tree = PrefixTree(tiers, share, self._nodes.forget)
        self.deadlines = self._tree.deadlines
        self._known = [0] * len(tiers)
        self.came: Callable[[float], object] = lambda now: None  # told when blocks have come from other replicas
        self._planes = [TIERS.index(tier.name) for tier in tiers]
        memory = [at for at, tier in enumerate(tiers) if tier.name != "disk"]
        self.chains = Chains(layout, self._nodes, self._tree, memory)  # what it can give to others

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each node at the time it ended."""
        while (deadline := self.deadlines.due) <= now:
            self._tree.expire(deadline)
            self._tell(deadline)

    # --- a request's way

    def match(self, prompt: Prompt, now: float, most: int | None = None) -> Found:
        """Look up the longest resident prefix of a prompt, of at most `most` blocks; refresh and pin it."""
        if self.deadlines.due <= now:
            self.expire(now)
        path = self._nodes.held(prompt.runs)
        size, nodes = prompt.block_size, self._nodes.by_number
        full = leading(path)
        if most is not None and most < full:
            path, full = upto(path, most)[0] if most else [], most
        found = Found(blocks=full, tokens=full * size)
        beside = None
        for read in prompt.reads:
            if read.blocks > full:
                continue
            node = nodes[read.number]
            if node is None or node.mark_expires <= now:
                continue
            if read.position > found.tokens:
                found.tail, found.tokens = node, read.position
            elif read.is_tail and not found.hit:
                beside = node
            found.hit = found.hit or read.position
        if beside is not None:  # the billed tail lies beside the chain that is reused; it is touched with the chain
            self._tree.touch([beside], now)
        if found.tail is not None:
            path.append(found.tail)
        if not path:
            return NOTHING
        found.reading = self._tree.read(path, now)
        return found

    def release(self, found: Found) -> None:
        """Let go what a request found."""
        if found.reading is not None:
            self._tree.release(found.reading)
            found.reading = None

    def store(self, prompt: Prompt, marks: Sequence[Mark], now: float, found: Found, begun: float) -> int:
        """Keep a computed prompt; return the position of its highest mark that is stored now.

        What was found of it moves up to the first tier. Marks live from when the request began.
        """
        tree, nodes, lifetimes, tenant = self._tree, self._nodes, self.lifetimes, prompt.tenant
        if len(tree.spaces) > 1 and found.reading is not None:
            path, last = upto(nodes.held(prompt.runs), found.blocks)
            if found.tail is not None:
                path, last = [*path, found.tail], 1
            tree.promote(path, last)
        if lifetimes.automatic and prompt.runs:
            path = nodes.path(prompt.runs)
            if not tree.store(path, lifetimes.default, now, tenant):
                nodes.trim(path)
        written = []
        for write, mark in zip(prompt.writes, marks, strict=False):  # none are given where nothing is stored
            path, ttl = nodes.path(prompt.runs[: write.runs]), lifetimes.ttls[mark.ttl]
            if write.tail != NONE:
                path.append(nodes.node(write.tail, path))
            whole = tree.store(path, ttl, now, tenant)
            written.append((mark.position, path[-1]))
            if whole:
                tree.mark(path[-1], ttl, begun)
            else:
                nodes.trim(path)
        self._tell(now)
        return max([position for position, node in written if node.mark_expires > now], default=0)

    def keep(self, name: Name, tenant: str, now: float) -> None:
        """Keep a block that an answer has generated and what is before it, where blocks are kept without marks."""
        if self.lifetimes.automatic:
            run, place = name
            runs = self._layout.path(run)
            blocks = sum([self._layout.runs[before].blocks for before in runs[:-1]]) + place + 1
            whole = self._nodes.path(runs)
            path, last = upto(whole, blocks)
            self._tree.store(path, self.lifetimes.default, now, tenant, last)
            self._nodes.trim(whole)
            self._tell(now)

    def is_marked(self, number: int, now: float) -> bool:
        """Return True if the breakpoint at the end of a run, or of a tail, by its number, may be read."""
        node = self._nodes.by_number[number]
        return node is not None and node.mark_expires > now

    def names(self, prompt: Prompt) -> list[Name]:
        """Return names of a prompt's full blocks: their runs, and their places in these."""
        return [(run, at) for run in prompt.runs for at in range(self._layout.runs[run].blocks)]

    def lost(self, name: Name, now: float) -> None:
        """Drop a block that the engine has evicted, the last one that is held of its chain, and the tails behind it."""
        run, place = name
        node = self._nodes.by_number[run]
        if node is None:
            return
        for tail in self._nodes.tails_behind(run):
            self._tree.drop(tail, 1)
        parts = parts_of(node)
        end = sum([part.length for part in parts])
        for part in reversed(parts):
            begin, held = end - part.length, part.copies[0].held
            if begin + held > place:
                self._tree.drop(part, begin + held - max(begin, place))
            end = begin
        self._tell(now)

    def sums(self, found: Found, prompt: Prompt, most: int, now: float) -> int:
        """Return tokens of a match that a rule can go on from which needs what all queries gave; at most `most`."""
        path, _ = upto(self._nodes.held(prompt.runs), found.blocks)
        if found.tail is not None:
            path.append(found.tail)
        for node in reversed(path):
            if node.sums is not None and node.end <= most:
                self._tree.touch([node.sums], now)
                return node.end
        return 0

    def store_sums(self, prompt: Prompt, marks: Sequence[Mark], reused: int, token_bytes: int, now: float) -> None:
        """Keep what the queries of a prompt gave its tokens, where that was computed: beyond the reused ones."""
        lifetimes = self.lifetimes
        tails = dict(zip([mark.position for mark in marks], prompt.writes, strict=False))
        ttls = {mark.position: lifetimes.ttls[mark.ttl] for mark in marks}
        for position in sum_positions(prompt.tokens, prompt.block_size, marks):
            if position <= reused:
                continue
            path = self._nodes.held(prompt.runs)
            blocks, rest = divmod(position, prompt.block_size)
            if leading(path) < blocks:
                continue
            path = self._tree.cut(path, blocks) if blocks else []
            if rest:
                tail = self._nodes.by_number[tails[position].tail]
                if tail is None:
                    continue
                path.append(tail)
            if not path:
                continue
            path.append(self._nodes.sums_of(path[-1], position * token_bytes))
            self._tree.store(path, ttls.get(position, lifetimes.default), now, prompt.tenant)
            self._nodes.trim(path)
        self._tell(now)

    def restore(self, contents: Contents, now: float, wall: float) -> list[Name]:
        """Insert what a running replica held into an empty cache, whose clock shows `now` at the Unix time `wall`.

        Returns the full blocks that came, the most recently used first.
        """
        names = []
        places = self._layout.places()
        for tier, plane in enumerate(self._planes):
            copies: dict[Copy, None] = {}
            for held in contents.tiers.get(TIERS[plane], ()):
                sums = not held.tokens
                number, place = places.get(held.parent if sums else held.key, (NONE, 0))
                if number == NONE:
                    continue
                runs = self._layout.path(number)
                blocks = place + 1 + sum(self._layout.runs[run].blocks for run in runs[:-1])
                path, last = upto(self._nodes.path(runs), blocks)
                if sums:
                    path, last = self._tree.cut(path, blocks), 1
                    path.append(self._nodes.sums_of(path[-1], held.plain))
                times = held.expires_at - wall + now, held.mark_ttl, held.mark_expires_at - wall + now
                if self._tree.restore(tier, path, last, held.tenant, (held.ttl, *times, held.reads)):
                    copies[path[-1].copies[tier]] = None
                    if number < len(self._layout.examples) and not sums:
                        names.append((number, place))
                self._nodes.trim(path)
            self._tree.order(tier, list(copies))
        self._tell(now)
        return names

    # --- from and to other replicas

    def depths(self, runs: Runs) -> Depths:
        """Return leading blocks of a prompt by tier, as routers know them: those in it or in a faster one."""
        if not runs or self._nodes.by_number[runs[0]] is None:  # as for most replicas and prompts
            return NOWHERE
        found = [0, 0, 0]
        path = self._nodes.held(runs)
        if len(self._planes) == 1:
            count = leading(path)
            return count, count, count
        for tier, plane in enumerate(self._planes):
            count = 0
            for node in path:
                held = node.copies[tier].held
                count += held
                if held < node.length:
                    break
            found[plane] = count
        device, host, disk = found
        if device > host:
            host = device
        return device, host, disk if disk > host else host

    def resident(self, prompt: Prompt) -> int:
        """Count the leading blocks of a prompt that some tier holds."""
        nodes, before, blocks = self._nodes.by_number, None, 0
        for run in prompt.runs:
            node = nodes[run]
            if node is None:
                break
            if node.parent is not before:  # one was split
                return leading(self._nodes.held(prompt.runs))
            blocks += node.length
            before = node
        return blocks - before.length + before.span if before is not None else 0

    def holds_all(self, run: int) -> bool:
        """Return True if some tier holds a run to its end, and all before it."""
        node = self._nodes.by_number[run]
        return node is not None and node.span == node.length

    def leaves(self, runs: Runs, marks: Sequence[Mark], size: int) -> int:
        """Count those blocks of the leading runs of a prompt that are stored once it is computed."""
        blocks = sum([self._layout.runs[run].blocks for run in runs])
        stored = self.lifetimes.stored_blocks(marks, blocks, size)
        tiers = [space.tier for space in self._tree.spaces]
        return min(blocks, stored, most_blocks(tiers, size * self._token_bytes, size))

    def leading(self, prompt: Prompt, most: int, now: float) -> Depths:
        """Count the leading blocks of a prompt that can be read, at most `most`, likewise."""
        if self.deadlines.due > now:
            device, host, anywhere = self.depths(prompt.runs)
            return min(device, most), min(host, most), min(anywhere, most)
        found = [0, 0, 0]
        for tier, plane in enumerate(self._planes):
            for node in self._nodes.held(prompt.runs):
                copy = node.copies[tier]
                held = copy.held if node.expires > now else min(copy.held, copy.pinned)
                found[plane] += held
                if held < node.length:
                    break
        device, host, disk = [min(count, most) for count in found]
        return device, max(device, host), max(device, host, disk)

    def adopt(self, prompt: Prompt, transfer: BlockTransfer, now: float) -> None:
        """Insert fetched blocks that a request is about to read, with a full TTL."""
        self.take_over(transfer.chains, now)
        self._tree.prolong(self._nodes.held(prompt.runs), self.lifetimes.default, now)

    def take_over(self, chains: Sequence[Chain], now: float) -> None:
        """Keep chains, whose times are seconds that are left, as far as they fit."""
        for chain in chains:
            self._tree.adopt(partial(self.chains.parts, chain, now), chain[0].tenant)
            self._nodes.trim(self._nodes.path(numbers(chain)))
            self._tell(now)
        self.came(now)

    def drop(self, now: float) -> None:
        """Drop everything: the replica is gone."""
        for level, known in zip(self._levels, self._known, strict=True):
            level.change(-known, now)
        self._stored.change(-sum(self._known), now)
        self._known = [0] * len(self._known)
        if self._late is not None:
            self._late.drop_replica(self._replica)

    # --- what is told

    def _tell(self, now: float) -> None:
        """Report what changed: bytes, removals, and what is held of which runs."""
        tree, late, known = self._tree, self._late, self._known
        total = left = 0
        for tier, space in enumerate(tree.spaces):
            if space.evicted or space.expired:
                left += space.evicted + space.expired
                self._removals.evicted += space.evicted
                self._removals.expired += space.expired
                space.evicted = space.expired = 0
            self._removals.short |= space.short
            if difference := space.bytes - known[tier]:
                known[tier] += difference
                self._levels[tier].change(difference, now)
                total += difference
        if total:
            self._stored.change(total, now)
        if late is not None:
            told = [number for node in tree.changed if (number := node.number) != NONE]  # sums: only that they left
            if told or left:
                runs = len(self._layout.examples)
                held = {number: self._depths_of(number) for number in told if number < runs}
                late.happened(self._replica, held, now)
        tree.changed.clear()

    def _depths_of(self, number: int) -> Depths:
        """Return leading blocks of a run by tier, as `depths` does."""
        node = self._nodes.by_number[number]
        if node is None:
            return NOWHERE
        found = [0, 0, 0]
        for part in parts_of(node):
            for tier, plane in enumerate(self._planes):
                found[plane] += part.copies[tier].held
        device, host, disk = found
        if device > host:
            host = device
        return device, host, disk if disk > host else host

"""The prefix blocks of one simulated replica: the prefix tree in virtual time, and what it adds up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes, sum_positions, sums_key
from warmkv.policies.prefix_tree.nodes import NEVER, Copy, Node
from warmkv.policies.prefix_tree.tree import Life, Path, PrefixTree, Reading
from warmkv.policies.tiers import Tier
from warmkv.prefixes.index import TIERS, Depths
from warmkv.prefixes.record import Mark
from warmkv.simulator.cache.late_index import LateIndex
from warmkv.simulator.cache.layout import NONE, Layout, Prompt, Runs
from warmkv.simulator.cache.measures import TimeWeightedGauge


@dataclass(slots=True)
class Removals:
    """Blocks and tails that left a tier, and why."""

    evicted: int = 0
    expired: int = 0


@dataclass(slots=True, eq=False)
class Found:
    """What is warm of a prompt. It is pinned until `ReplicaCache.release`."""

    hit: int = 0  # position of the highest breakpoint that may be read; 0 if none
    blocks: int = 0  # leading full blocks that are resident
    tokens: int = 0  # leading tokens whose KV is resident, a tail included
    tail: Node | None = field(default=None, repr=False)
    reading: Reading | None = field(default=None, repr=False)


NOTHING = Found()


@dataclass(frozen=True, slots=True)
class MovedBlock:
    """A block, tail or column sums on the way to another replica. Times in its life are seconds that are left."""

    key: bytes
    number: int  # of its run
    place: int  # in the run
    size: int  # bytes
    life: Life
    tenant: str
    sums: int = 0  # bytes of column sums uncompressed; 0 for KV


Chain = Sequence[MovedBlock]


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks on their way from one replica to another."""

    nbytes: int
    blocks: int = 0  # leading blocks of the prompt that are there once it has arrived
    more: bool = False  # whether the donor has more than fits into one
    chains: Sequence[Chain] = ()  # from their first blocks on


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
        self._replica, self._layout, self._token_bytes, self._lifetimes = replica, layout, token_bytes, lifetimes
        self._stored, self._removals, self._late = stored, removals, late
        self._levels = by_tier or [TimeWeightedGauge() for _ in tiers]
        self._tree = PrefixTree(tiers, share, self._forget)
        self._nodes: list[Node | None] = [None] * len(layout.runs)
        self._sizes: dict[tuple[int, int], list[int]] = {}  # bytes in every tier, by plain bytes and tokens
        self._known = [0] * len(tiers)
        self._planes = [TIERS.index(tier.name) for tier in tiers]
        self._memory = [at for at, tier in enumerate(tiers) if tier.name != "disk"]

    @property
    def due(self) -> float:
        """Return a time before which nothing expires."""
        return self._tree.deadlines.due

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL, each node at the time it ended."""
        while (deadline := self._tree.deadlines.due) <= now:
            self._tree.expire(deadline)
            self._tell(deadline)

    # --- a request's way

    def match(self, prompt: Prompt, now: float) -> Found:
        """Look up the longest resident prefix of a prompt; refresh and pin it."""
        if self._tree.deadlines.due <= now:
            self.expire(now)
        path = self._held(prompt.runs)
        size, nodes = prompt.record.block_size, self._nodes
        full = _leading(path)
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
        if path:
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
        tree, lifetimes, tenant = self._tree, self._lifetimes, prompt.record.tenant
        if len(tree.spaces) > 1 and found.reading is not None:
            path, last = _upto(self._held(prompt.runs), found.blocks)
            if found.tail is not None:
                path, last = [*path, found.tail], 1
            tree.promote(path, last)
        if lifetimes.automatic and prompt.runs:
            path = self._path(prompt.runs)
            tree.store(path, lifetimes.default, now, tenant)
            self._trim(path)
        written = []
        for write, mark in zip(prompt.writes, marks, strict=False):  # none are given where nothing is stored
            path, ttl = self._path(prompt.runs[: write.runs]), lifetimes.ttls[mark.ttl]
            if write.tail != NONE:
                path.append(self._node(write.tail, path))
            tree.store(path, ttl, now, tenant)
            tree.mark(path[-1], ttl, begun)
            written.append((mark.position, path[-1]))
            self._trim(path)
        self._tell(now)
        return max([position for position, node in written if node.mark_expires > now], default=0)

    def sums(self, found: Found, prompt: Prompt, most: int, now: float) -> int:
        """Return tokens of a match that a rule can go on from which needs what all queries gave; at most `most`."""
        path, _ = _upto(self._held(prompt.runs), found.blocks)
        if found.tail is not None:
            path.append(found.tail)
        for node in reversed(path):
            if node.sums is not None and node.end <= most:
                self._tree.touch([node.sums], now)
                return node.end
        return 0

    def store_sums(self, prompt: Prompt, marks: Sequence[Mark], reused: int, token_bytes: int, now: float) -> None:
        """Keep what the queries of a prompt gave its tokens, where that was computed: beyond the reused ones."""
        record, lifetimes = prompt.record, self._lifetimes
        tails = dict(zip([mark.position for mark in marks], prompt.writes, strict=False))
        ttls = {mark.position: lifetimes.ttls[mark.ttl] for mark in marks}
        for position in sum_positions(record.input_tokens, record.block_size, marks):
            if position <= reused:
                continue
            path = self._held(prompt.runs)
            blocks, rest = divmod(position, record.block_size)
            if _leading(path) < blocks:
                continue
            path = self._tree.cut(path, blocks) if blocks else []
            if rest:
                tail = self._nodes[tails[position].tail]
                if tail is None:
                    continue
                path.append(tail)
            if not path:
                continue
            path.append(self._sums_of(path[-1], position * token_bytes))
            self._tree.store(path, ttls.get(position, lifetimes.default), now, record.tenant)
            self._trim(path)
        self._tell(now)

    def restore(self, contents: Contents, now: float, wall: float) -> None:
        """Insert what a running replica held into an empty cache, whose clock shows `now` at the Unix time `wall`."""
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
                path, last = _upto(self._path(runs), blocks)
                if sums:
                    path, last = self._tree.cut(path, blocks), 1
                    path.append(self._sums_of(path[-1], held.plain))
                times = held.expires_at - wall + now, held.mark_ttl, held.mark_expires_at - wall + now
                if self._tree.restore(tier, path, last, held.tenant, (held.ttl, *times, held.reads)):
                    copies[path[-1].copies[tier]] = None
                self._trim(path)
            self._tree.order(tier, list(copies))
        self._tell(now)

    # --- from and to other replicas

    def depths(self, runs: Runs) -> Depths:
        """Return leading blocks of a prompt by tier, as routers know them: those in it or in a faster one."""
        if not runs or self._nodes[runs[0]] is None:  # as for most replicas and prompts
            return 0, 0, 0
        found = [0, 0, 0]
        path = self._held(runs)
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
        nodes, before, blocks = self._nodes, None, 0
        for run in prompt.runs:
            node = nodes[run]
            if node is None:
                break
            if node.parent is not before:  # one was split
                return _leading(self._held(prompt.runs))
            blocks += node.length
            before = node
        return blocks - before.length + before.span if before is not None else 0

    def leading(self, prompt: Prompt, most: int, now: float) -> Depths:
        """Count the leading blocks of a prompt that can be read, at most `most`, likewise."""
        if self._tree.deadlines.due > now:
            device, host, anywhere = self.depths(prompt.runs)
            return min(device, most), min(host, most), min(anywhere, most)
        found = [0, 0, 0]
        for tier, plane in enumerate(self._planes):
            for node in self._held(prompt.runs):
                copy = node.copies[tier]
                held = copy.held if node.expires > now else min(copy.held, copy.pinned)
                found[plane] += held
                if held < node.length:
                    break
        device, host, disk = [min(count, most) for count in found]
        return device, max(device, host), max(device, host, disk)

    def lend(self, prompt: Prompt, first: int, last: int, most: int, sums: bool, now: float) -> BlockTransfer:
        """Return blocks of a prompt from number `first` on and before `last`, as far as they are in memory here.

        At most `most` bytes, but at least a block. With the last of them come tails that may be read; with `sums`, no
        more blocks than there are column sums for, and these as well.
        """
        nodes = self._held(prompt.runs)
        path = self._blocks(nodes, now)[:last]
        beside = [
            (read.blocks, node, block)
            for read in prompt.reads
            if read.is_tail and read.blocks <= len(path) and (node := self._nodes[read.number]) is not None
            for block in self._blocks([node], now)
        ]
        ends = dict(_ends(nodes))
        summed: list[tuple[int, Chain]] = []
        if sums:
            behind = [(end, node, path[:end]) for end, node in ends.items() if end <= len(path)]
            behind += [(end, node, [*path[:end], block]) for end, node, block in beside]
            summed = [
                (end, [*chain, block]) for end, node, chain in behind for block in self._sums(node, chain[-1], now)
            ]
            path = path[: max([end for end, _ in summed], default=0)]
            beside = [(end, node, block) for end, node, block in beside if end <= len(path)]
        nbytes = 0
        for count, block in enumerate(path[first:]):
            nbytes += block.size
            if count and nbytes > most:
                end = first + count
                return BlockTransfer(nbytes - block.size, end, True, [path[:end]])
        chains = [path, *([*path[:end], block] for end, _, block in beside), *(chain for _, chain in summed)]
        nbytes += sum(block.size for _, _, block in beside) + sum(chain[-1].size for _, chain in summed)
        return BlockTransfer(nbytes, len(path), False, [chain for chain in chains if chain])

    def adopt(self, prompt: Prompt, transfer: BlockTransfer, now: float) -> None:
        """Insert fetched blocks that a request is about to read, with a full TTL."""
        self.take_over(transfer.chains, now)
        self._tree.prolong(self._held(prompt.runs), self._lifetimes.default, now)

    def holds(self, chain: Chain, now: float) -> bool:
        """Return True if all of a chain is in memory."""
        path = self._held(_numbers(chain))
        held = self._blocks(path, now)
        if chain and chain[-1].sums:
            return len(held) >= len(chain) - 1 and bool(self._sums(path[-1], chain[-2], now))
        return len(held) >= len(chain)

    def take_over(self, chains: Sequence[Chain], now: float) -> None:
        """Keep chains, whose times are seconds that are left, as far as they fit."""
        for chain in chains:
            self._tree.adopt(partial(self._parts, chain, now), chain[0].tenant)
            self._trim(self._path(_numbers(chain)))
            self._tell(now)

    def hottest(self, most: int, now: float) -> list[Chain]:
        """Return chains in memory, what would be evicted last first, together at most so many bytes.

        Of the chain that does not fit there is the beginning.
        """
        chains: list[Chain] = []
        taken: set[bytes] = set()
        every = [node for node in self._nodes if node is not None]
        every = [part for node in every for part in _parts_of(node)]
        every += [node.sums for node in every if node.sums is not None]
        for tier in self._memory:
            copies = [copy for node in every if (copy := node.copies[tier]).held]
            for end in self._tree.spaces[tier].by_worth(copies):
                chain = self._chain_to(end, now)
                for held, block in enumerate(chain):
                    if block.key in taken:
                        continue
                    most -= block.size
                    if most < 0:
                        return [*chains, chain[:held]] if held else chains
                    taken.add(block.key)
                if chain:
                    chains.append(chain)
        return chains

    def has(self, block: MovedBlock) -> bool:
        """Return True if some tier holds a block, as routers know it: column sums are not told."""
        node = self._nodes[block.number]
        return not block.sums and node is not None and sum(part.span for part in _parts_of(node)) > block.place

    def drop(self, now: float) -> None:
        """Drop everything: the replica is gone."""
        for level, known in zip(self._levels, self._known, strict=True):
            level.change(-known, now)
        self._stored.change(-sum(self._known), now)
        self._known = [0] * len(self._known)
        if self._late is not None:
            self._late.drop_replica(self._replica)

    # --- nodes

    def _held(self, runs: Sequence[int]) -> Path:
        """Return the nodes of runs up to the last that is held."""
        nodes, before = self._nodes, None
        path: Path = []
        for run in runs:
            node = nodes[run]
            if node is None:
                break
            if node.parent is before:
                path.append(node)
            else:
                path += [part for part in _parts_of(node) if part.span]
            before = node
        return path

    def _path(self, runs: Sequence[int]) -> Path:
        """Return the nodes of runs, making those that are missing."""
        nodes, before = self._nodes, None
        path: Path = []
        for run in runs:
            node = nodes[run]
            if node is None:
                node = self._node(run, path)
            if node.parent is before:
                path.append(node)
            else:
                path += _parts_of(node)
            before = node
        return path

    def _node(self, number: int, path: Path) -> Node:
        """Return a node by its number; make it behind a path if it is missing."""
        node = self._nodes[number]
        if node is None:
            _, blocks, tokens = self._layout.runs[number]
            plain = tokens * self._token_bytes
            parent = path[-1] if path else None
            end = blocks * tokens + (parent.end if parent is not None else 0)
            node = Node(number, parent, blocks, tokens, end, plain, self._weights(plain, tokens))
            self._nodes[number] = node
        return node

    def _sums_of(self, node: Node, plain: int) -> Node:
        """Return the node of the column sums of all up to a node."""
        if node.sums is None:
            node.sums = Node(NONE, node, 1, 0, node.end, plain, self._weights(plain, 0))
        return node.sums

    def _weights(self, plain: int, tokens: int) -> list[int]:
        """Return bytes of a block in every tier."""
        sizes = self._sizes.get((plain, tokens))
        if sizes is None:
            sizes = [space.weigh(plain, tokens) for space in self._tree.spaces]
            self._sizes[plain, tokens] = sizes
        return sizes

    def _trim(self, path: Path) -> None:
        """Forget the nodes at the end of a path that did not fit anywhere."""
        for node in reversed(path):
            if node.span:
                break
            self._forget(node)

    def _forget(self, node: Node) -> None:
        """Drop a node that no tier holds. The last part of a run that was split is made one with the part before it."""
        head, number = node.parent, node.number
        if number == NONE:
            assert head is not None
            head.sums = None
            node.drop()
            return
        last = self._nodes[number]
        if last is None:
            return
        parts = _parts_of(last)
        if parts[0] is node:
            self._nodes[number] = None
            for part in parts:
                part.drop()
        elif last is node and (head := parts[-2]).sums is None and not any(copy.pinned for copy in head.copies):
            head.length, head.end = head.length + node.length, node.end
            self._nodes[number] = head
            node.drop()
            if not head.span:
                self._forget(head)

    # --- blocks on their way

    def _blocks(self, path: Path, now: float) -> list[MovedBlock]:
        """Return the leading blocks of nodes that are in memory."""
        found: list[MovedBlock] = []
        number, place = NONE, 0
        for node in path:
            if node.number != number:
                number, place = node.number, 0
                keys = self._layout.keys(number)
            for at in range(node.length):
                block = self._block(node, at, keys[place], place, now)
                if block is None:
                    return found
                found.append(block)
                place += 1
        return found

    def _sums(self, node: Node, behind: MovedBlock, now: float) -> list[MovedBlock]:
        """Return the column sums at the end of a node, whose last block is `behind`, if they are in memory."""
        sums = node.sums
        block = None if sums is None else self._block(sums, 0, sums_key(behind.key), behind.place, now)
        return [] if block is None or sums is None else [replace(block, number=behind.number, sums=sums.plain)]

    def _block(self, node: Node, at: int, key: bytes, place: int, now: float) -> MovedBlock | None:
        """Return a block of a node as the fastest tier in memory has it."""
        copy = next((copy for tier in self._memory if (copy := node.copies[tier]).held > at), None)
        if copy is None or node.expires <= now:
            return None
        mark = (node.mark_ttl, node.mark_expires - now) if at == node.length - 1 else (0.0, NEVER)
        life = (node.ttl, node.expires - now, *mark, node.reads)
        return MovedBlock(key, node.number, place, copy.size, life, copy.tenant)

    def _chain_to(self, end: Copy, now: float) -> list[MovedBlock]:
        """Return the blocks in memory of the path up to the last block of a copy."""
        path, blocks = end.node.path(), end.held
        if end.node.number == NONE:  # column sums
            path, blocks = path[:-1], path[-2].length
        blocks += sum(node.length for node in path[:-1])
        chain = self._blocks(path, now)[:blocks]
        if end.node.number == NONE and len(chain) == blocks:
            chain += self._sums(path[-1], chain[-1], now)
        return chain

    def _parts(self, chain: Chain, now: float) -> Iterator[tuple[Path, int, Life]]:
        """Yield the path to the end of each part of a chain that has one life, and its blocks of the last node."""
        for at, block in enumerate(chain):
            following = chain[at + 1] if at + 1 < len(chain) else None
            if following is not None and following.life == block.life and not following.sums:
                continue
            until = chain[: at + 1 - bool(block.sums)]
            path = self._path(_numbers(until))
            blocks = until[-1].place + 1 + sum(self._layout.runs[run].blocks for run in _numbers(until)[:-1])
            path, last = _upto(path, blocks)
            if block.sums:
                path = self._tree.cut(path, blocks)
                path.append(self._sums_of(path[-1], block.sums))
                last = 1
            ttl, expires, mark_ttl, mark_expires, reads = block.life
            yield path, last, (ttl, expires + now, mark_ttl, mark_expires + now, reads)

    # --- what is told

    def _tell(self, now: float) -> None:
        """Report what changed: bytes, removals, and what is held of which runs."""
        tree, late, removals = self._tree, self._late, self._removals
        changed = [node.number for node in tree.changed] if late is not None else []
        tree.changed.clear()
        total = left = 0
        for tier, space in enumerate(tree.spaces):
            if gone := space.evicted + space.expired:
                removals.evicted += space.evicted
                removals.expired += space.expired
                space.evicted = space.expired = 0
                left += gone
            if difference := space.bytes - self._known[tier]:
                self._known[tier] += difference
                self._levels[tier].change(difference, now)
                total += difference
        if total:
            self._stored.change(total, now)
        if late is not None:
            told = [number for number in changed if number != NONE]  # of column sums only that they left
            if told or left:
                runs = len(self._layout.examples)
                held = {number: self._depths_of(number) for number in told if number < runs}
                late.happened(self._replica, held, now)

    def _depths_of(self, number: int) -> Depths:
        """Return leading blocks of a run by tier, as `depths` does."""
        node = self._nodes[number]
        found = [0, 0, 0]
        for part in _parts_of(node) if node is not None else ():
            for tier, plane in enumerate(self._planes):
                found[plane] += part.copies[tier].held
        return found[0], max(found[:2]), max(found)


def _parts_of(node: Node) -> list[Node]:
    """Return the nodes that a run was split into, up to this one."""
    parts = [node]
    while (before := parts[-1].parent) is not None and before.number == node.number:
        parts.append(before)
    return parts[::-1]


def _leading(path: Path) -> int:
    """Return leading blocks of a held path that one tier holds."""
    return sum([node.length for node in path[:-1]]) + path[-1].span if path else 0


def _ends(path: Path) -> Iterator[tuple[int, Node]]:
    """Yield each node of a path with the blocks up to its end."""
    blocks = 0
    for node in path:
        blocks += node.length
        yield blocks, node


def _upto(path: Path, blocks: int) -> tuple[Path, int]:
    """Return the nodes of the leading blocks of a path, and how many of them the last one has."""
    for at, node in enumerate(path):
        if blocks <= node.length:
            return path[: at + 1], blocks
        blocks -= node.length
    return path, path[-1].length if path else 0


def _numbers(chain: Chain) -> list[int]:
    """Return the runs of a chain."""
    return list(dict.fromkeys(block.number for block in chain))

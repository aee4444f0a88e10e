"""The prefix tree by the keys of blocks, as a replica has it: what is found of a prompt, kept, and given up.

A key stands for a block and all before it, so a node is found by its first one and compared by its last one: a look-up
costs O(nodes on its path), whatever their blocks. A node splits where a prompt leaves it or ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from warmkv.policies.prefix_tree.held import Change, HeldBlock, HeldRun, run_of
from warmkv.policies.prefix_tree.nodes import Copy, Node
from warmkv.policies.prefix_tree.tree import Life, Path, PrefixTree, Reading
from warmkv.policies.tiers import Tier

UNNUMBERED = 0


class RadixTree:
    """Know which blocks, tails and column sums the tiers of a replica hold, fastest first. Not thread-safe.

    `share` of each tier is reserved for each tenant; 0 for none. What an operation does to blocks is told by `changes`.
    """

    def __init__(self, tiers: Sequence[Tier], share: float = 0.0) -> None:
        self.tiers = list(tiers)
        self._tree = PrefixTree(tiers, share, self._forget, self._trim, self._divided)
        self.spaces = self._tree.spaces
        self._starts: dict[bytes, Node] = {}  # by the key of their first block
        self._ends: dict[bytes, Node] = {}  # by that of their last one
        self._sizes: dict[tuple[int, int], list[int]] = {}  # bytes in every tier, by plain bytes and tokens

    def changes(self) -> list[Change]:
        """Return what came to tiers and left them since this was asked last, in order."""
        told = self._tree.changes
        assert told is not None
        taken = told[:]
        told.clear()
        self._tree.changed.clear()
        return taken

    @property
    def next_deadline(self) -> float:
        """Return the earliest time at which something can expire; infinite if nothing ever does."""
        return self._tree.deadlines.due

    # --- looking up

    def find(self, keys: Sequence[bytes]) -> Path:
        """Return the nodes of the leading keys that are held; the last one ends where they do."""
        path: Path = []
        at, total, starts = 0, len(keys), self._starts
        while at < total and (node := starts.get(keys[at])) is not None:
            end = at + node.length
            if end > total or keys[end - 1] != node.keys[-1]:
                path.append(self._tree.split(node, _alike(node.keys, keys, at)))
                break
            path.append(node)
            at = end
        return path

    def starting(self, key: bytes) -> Node | None:
        """Return the node that begins with a key: of a tail or column sums, the only one."""
        return self._starts.get(key)

    def ending(self, key: bytes) -> Node | None:
        """Return the node that ends with a key; None if it is not held. O(1) where a prompt has ended, else O(n)."""
        node = self._ends.get(key)
        if node is None and (node := self._containing(key)) is not None:
            node = self._tree.split(node, node.keys.index(key) + 1)
        return node

    def marked(self, key: bytes, now: float) -> Node | None:
        """Return the node at whose end a breakpoint was written, at exactly this prefix, if it may still be read."""
        node = self._ends.get(key)
        return node if node is not None and node.mark_expires > now else None

    # --- reading

    def read(self, path: Path, now: float) -> Reading:
        """Refresh what is held of a path in any tier, and pin it until `release`."""
        return self._tree.read(path, now)

    def pin(self, path: Path, tier: int) -> Reading:
        """Keep what a tier holds of a path until `release`."""
        return self._tree.pin(path, tier)

    def release(self, reading: Reading) -> None:
        self._tree.release(reading)

    def touch(self, path: Path, now: float) -> None:
        """Refresh recency and lives of what is held of a path, marks included."""
        self._tree.touch(path, now)

    # --- writing

    def path(self, keys: Sequence[bytes], tokens: int, plain: int) -> Path:
        """Return the nodes of a chain of blocks of so many tokens and bytes each, making one for what is missing."""
        path = self.find(keys)
        held = sum([node.length for node in path])
        if held < len(keys):
            path.append(self.behind(path, keys[held:], tokens, plain))
        return path

    def behind(self, path: Path, keys: Sequence[bytes], tokens: int, plain: int) -> Node:
        """Return the node behind a path that begins with the first of these keys, made of all of them if it is missing.

        A tail is one of fewer tokens, column sums are one of none. `plain` are the bytes of each.
        """
        node = self._starts.get(keys[0])
        return node or self._make(list(keys), path[-1] if path else None, tokens, plain)

    def store(self, path: Path, ttl: float, now: float, tenant: str) -> bool:
        """Keep a computed path in the first tier, and in the next one as well if not all of it fits there.

        What is held of it already lives at least `ttl` seconds longer. Returns True if a tier holds all of it.
        """
        self._tree.clock = now
        whole = self._tree.store(path, ttl, now, tenant)
        if not whole:
            self._drop_unheld(path)
        return whole

    def mark(self, node: Node, ttl: float, at: float) -> None:
        """Note that a breakpoint was written at the end of a node; it is readable for `ttl` seconds after each use."""
        self._tree.mark(node, ttl, at)

    def promote(self, path: Path, now: float) -> None:
        """Keep in the first tier what was found further down."""
        self._tree.clock = now
        self._tree.promote(path, path[-1].length)

    def copy_down(self, source: int, tier: int, path: Path, last: int) -> None:
        """Keep in a lower tier, too, what one holds of a path up to the block number `last` of its last node."""
        self._tree.copy_down(source, tier, path, last)

    def prolong(self, path: Path, ttl: float, now: float) -> None:
        """Let what is held of a path live at least `ttl` seconds from now, and from each use on."""
        self._tree.prolong(path, ttl, now)

    def adopt(self, parent: Node | None, blocks: Sequence[HeldBlock], now: float) -> None:
        """Keep blocks that another replica has behind a node, each behind the one before it, with their lives there.

        Where, as `store` says. What is here of them already lives as long as what comes behind it.
        """
        ends = [*_ends(blocks)]

        def parts() -> Iterator[tuple[Path, int, Life]]:
            for end in ends:
                path = self._behind(parent, blocks, ends, end)
                yield path, path[-1].length, _life(blocks[end - 1])

        self._tree.clock = now
        self._tree.adopt(parts, blocks[0].tenant)
        self._drop_unheld(self._behind(parent, blocks, ends, len(blocks)))

    def restore(self, tier: int, blocks: Iterable[HeldBlock]) -> list[HeldBlock]:
        """Take up blocks in a tier, each behind what it follows, as far as there is room; return those left out.

        Blocks that live alike share nodes. The first ones count as used last.
        """
        homes = {key: node for node in self._starts.values() for key in node.keys}  # if they are not split since
        copies: dict[Copy, None] = {}
        left_out = []
        for block in blocks:
            parent = _home(homes.get(block.parent), block.parent)
            node = None if block.parent and parent is None else self._taken_up(tier, block, parent)
            if node is None:
                left_out.append(block)
            else:
                homes[block.key] = node
                copies[node.copies[tier]] = None
        self._tree.order(tier, list(copies))
        return left_out

    def _taken_up(self, tier: int, block: HeldBlock, parent: Node | None) -> Node | None:
        """Take up a block in a tier behind a key of its parent's node; return its own node, None without room."""
        node = self._starts.get(block.key)
        if parent is not None and parent.keys[-1] != block.parent:
            inner = parent.keys.index(block.parent) + 1
            if parent.keys[inner] == block.key:
                node = parent
            else:
                parent = self._tree.split(parent, inner)
        if node is None and parent is not None and self._goes_on(parent, tier, block):
            node = parent
            del self._ends[block.parent]
            node.keys.append(block.key)
            node.length, node.end = node.length + 1, block.end
            self._ends[block.key] = node
        elif node is None:
            node = self._make([block.key], parent, block.tokens, block.plain)
        place = node.length if node.keys[-1] == block.key else node.keys.index(block.key) + 1
        if self._tree.restore(tier, node.path(), place, block.tenant, _life(block)):
            return node
        self._drop_unheld([node])
        return None

    def _goes_on(self, node: Node, tier: int, block: HeldBlock) -> bool:
        """Return True if a block behind a node may be one of its own: nothing else is there, and it lives alike."""
        copy = node.copies[tier]
        alone = copy.held == node.length and not any(each.children or each.pinned for each in node.copies)
        kind = (node.tokens, node.plain, copy.tenant) == (block.tokens, block.plain, block.tenant)
        life = (node.ttl, node.expires, node.mark_ttl, node.reads) == (block.ttl, block.expires_at, 0.0, block.reads)
        return alone and kind and life

    # --- leaving

    def expire(self, now: float) -> None:
        """Drop what has outlived its TTL."""
        if self._tree.deadlines.due <= now:
            self._tree.expire(now)

    def lose(self, keys: Iterable[bytes], tier: int) -> None:
        """Give up keys in a tier and all that is held behind them there, readers or not.

        Takes O(1) for each that nothing is held behind when it is its turn, and O(n) for all others together.
        """
        inner = set()
        for key in keys:
            node = self._ends.get(key)
            if node is not None and node.copies[tier].held == node.length and node.copies[tier].loose:
                self._tree.drop(node, 1, tier)
            else:
                inner.add(key)
        if inner:
            self._lose_inner(inner, tier)

    def _lose_inner(self, keys: set[bytes], tier: int) -> None:
        gone: dict[Node, None] = {}
        for node in [*self._starts.values()]:
            if not keys.isdisjoint(node.keys):
                place = next(at for at, key in enumerate(node.keys) if key in keys)
                if place:
                    self._tree.split(node, place)
                gone[node] = None
        if gone:
            for node in sorted(self._starts.values(), key=_depth):
                if node.parent in gone:
                    gone[node] = None
            self._tree.lose(tier, sorted(gone, key=_depth))

    def drop(self, tenant: str, kept: set[bytes]) -> None:
        """Give up what is of a tenant, but what is `kept`, and all behind it, readers or not. Takes O(n)."""
        for tier in range(len(self.spaces)):
            held = [node for node in self._starts.values() if node.copies[tier].held]
            self.lose({node.keys[0] for node in held if node.copies[tier].tenant == tenant} - kept, tier)

    # --- contents

    def held(self, path: Path, tiers: Sequence[int]) -> Iterator[HeldBlock]:
        """Yield the leading blocks of a path, as the first of some tiers has each, up to one that none has."""
        for node in path:
            copies = [node.copies[tier] for tier in tiers]
            at = 0
            for copy in sorted(copies, key=lambda copy: copy.held):
                if copy.held > at:
                    first = next(each for each in copies if each.held >= copy.held)
                    yield from run_of(first, at, copy.held).blocks()
                    at = copy.held
            if at < node.length:
                return

    def recent(self, tier: int) -> Iterator[HeldRun]:
        """Yield what a tier holds, the most recently used first, but nothing before what it is behind."""
        held = [node for node in self._starts.values() if node.copies[tier].held]
        seen: set[Node] = set()
        for node in sorted(held, key=lambda node: -node.copies[tier].used):
            for each in node.path():
                if each not in seen:
                    seen.add(each)
                    copy = each.copies[tier]
                    yield run_of(copy, 0, copy.held)

    def by_worth(self, tier: int) -> list[tuple[Path, int]]:
        """Return the paths to the ends of what a tier holds, in reverse order of eviction. O(n log n).

        With each go the blocks that the tier holds of its last node.
        """
        copies = [copy for node in self._starts.values() if (copy := node.copies[tier]).held]
        return [(end.node.path(), end.held) for end in self.spaces[tier].by_worth(copies)]

    # --- nodes

    def _make(self, keys: list[bytes], parent: Node | None, tokens: int, plain: int) -> Node:
        end = len(keys) * tokens + (parent.end if parent is not None else 0)
        node = Node(UNNUMBERED, parent, len(keys), tokens, end, plain, self._weights(plain, tokens))
        node.keys = keys
        self._starts[keys[0]] = self._ends[keys[-1]] = node
        if not tokens and parent is not None:
            parent.sums = node
        return node

    def _behind(self, parent: Node | None, blocks: Sequence[HeldBlock], ends: Sequence[int], last: int) -> Path:
        """Return the path to the first `last` blocks behind a node, making what is missing: a node up to each end."""
        path, at = parent.path() if parent is not None else [], 0
        keys = [block.key for block in blocks[:last]]
        while at < last:
            found = self.find(keys[at:])
            if not found:
                block, end = blocks[at], ends[bisect_right(ends, at)]
                found = [self._make(keys[at:end], path[-1] if path else None, block.tokens, block.plain)]
            path += found
            at += sum([node.length for node in found])
        return path

    def _weights(self, plain: int, tokens: int) -> list[int]:
        """Return bytes of a block in every tier."""
        sizes = self._sizes.get((plain, tokens))
        if sizes is None:
            sizes = self._sizes[plain, tokens] = [tier.weigh(plain, tokens) for tier in self.tiers]
        return sizes

    def _containing(self, key: bytes) -> Node | None:
        return next((node for node in self._starts.values() if key in node.keys), None)

    def _drop_unheld(self, path: Path) -> None:
        """Forget what no tier holds of a path."""
        for node in reversed(path):
            span = node.span
            if span:
                if span < node.length:
                    self._trim(node, span)
                return
            self._forget(node)

    def _forget(self, node: Node) -> None:
        if node.keys and self._starts.get(node.keys[0]) is node:
            del self._starts[node.keys[0]], self._ends[node.keys[-1]]
            if node.parent is not None and node.parent.sums is node:
                node.parent.sums = None
            node.drop()

    def _trim(self, node: Node, blocks: int) -> None:
        del self._ends[node.keys[-1]]
        node.end -= (node.length - blocks) * node.tokens
        node.keys, node.length = node.keys[:blocks], blocks
        self._ends[node.keys[-1]] = node

    def _divided(self, head: Node, node: Node) -> None:
        self._starts[head.keys[0]] = self._ends[head.keys[-1]] = head
        self._starts[node.keys[0]] = node


def _alike(held: Sequence[bytes], keys: Sequence[bytes], at: int) -> int:
    """Return how many leading keys are those from number `at` on; the first one is."""
    most = min(len(held), len(keys) - at)
    return 1 + bisect_left(range(1, most), True, key=lambda place: held[place] != keys[at + place])


def _ends(blocks: Sequence[HeldBlock]) -> Iterator[int]:
    """Yield the ends of parts of a chain that have one life, and blocks of one kind."""
    for at in range(1, len(blocks)):
        one, other = blocks[at - 1], blocks[at]
        if _life(one) != _life(other) or one.tokens != other.tokens:
            yield at
    yield len(blocks)


def _life(block: HeldBlock) -> Life:
    return block.ttl, block.expires_at, block.mark_ttl, block.mark_expires_at, block.reads


def _home(node: Node | None, key: bytes) -> Node | None:
    """Return the node that has a key, given one that had it, perhaps before it was split."""
    while node is not None and node.keys[-1] != key and key not in node.keys:
        node = node.parent
    return node


def _depth(node: Node) -> tuple[int, bool]:
    """Order nodes so that each is behind its parent; column sums have no tokens."""
    return node.end, not node.tokens

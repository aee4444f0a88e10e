"""Nodes of the prefix tree, and what each tier holds of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

EXPIRED = -math.inf  # when what has no life, or no mark, expires


class Copy:
    """What a tier holds of a node: its `held` leading blocks of `size` bytes. Eviction orders look at the last of them.

    `pins` counts the requests that read all of the node, `partial` has the leading blocks of those that read less, and
    `partly` is the most of these.
    """

    __slots__ = (
        "children",
        "floor",
        "held",
        "node",
        "parent",
        "partial",
        "partly",
        "pins",
        "queued",
        "since",
        "size",
        "tenant",
        "used",
    )

    def __init__(self, node: Node, parent: Copy | None, size: int) -> None:
        self.node, self.parent, self.size = node, parent, size
        self.held = self.pins = self.partly = self.used = 0
        self.children = 0  # nodes behind this one of which the tier holds blocks
        self.partial: dict[object, int] | None = None
        self.floor = 0.0  # priority of what had been evicted last when it was used
        self.tenant = ""
        self.queued = 0  # the number of its record in the queue of eviction; 0 if there is none
        self.since = math.nan  # when the last of its blocks came, where changes are told

    @property
    def tokens(self) -> int:
        return self.node.tokens

    @property
    def end(self) -> int:
        """Return tokens from the start of the prompt to the end of the last block held."""
        node = self.node
        return node.end - (node.length - self.held) * node.tokens

    @property
    def reads(self) -> int:
        return self.node.reads

    @property
    def pinned(self) -> int:
        """Return leading blocks that requests read."""
        return self.node.length if self.pins else self.partly

    def read_part(self, partial: dict[object, int]) -> None:
        """Set who reads how many of its leading blocks, of those that do not read all."""
        self.partial, self.partly = partial or None, max(partial.values(), default=0)

    @property
    def loose(self) -> int:
        """Return blocks at the end that can go now."""
        return 0 if self.children or self.pins else self.held - self.partly


class Node:
    """A run of blocks behind `parent`. `number` is its user's name for it; the parts of a split run share it.

    `keys` are those of its blocks, where blocks have any. `ttl` counts from each use until `expires`; `mark_ttl`
    likewise, of the breakpoint at its end. Times are seconds.
    """

    __slots__ = (
        "copies",
        "end",
        "expires",
        "keys",
        "length",
        "mark_expires",
        "mark_ttl",
        "number",
        "parent",
        "plain",
        "reads",
        "sums",
        "tokens",
        "ttl",
        "used_at",
        "watched",
    )

    def __init__(
        self, number: int, parent: Node | None, length: int, tokens: int, end: int, plain: int, sizes: Sequence[int]
    ) -> None:
        self.number, self.parent, self.length, self.tokens, self.end = number, parent, length, tokens, end
        self.plain = plain  # bytes of a block uncompressed
        self.keys: list[bytes] = []
        self.copies: list[Copy] = []
        for tier, size in enumerate(sizes):
            self.copies.append(Copy(self, parent.copies[tier] if parent is not None else None, size))
        self.sums: Node | None = None  # column sums of all up to its end
        self.reads = 0
        self.ttl, self.expires, self.mark_ttl, self.mark_expires = 0.0, EXPIRED, 0.0, EXPIRED
        self.used_at = math.nan  # when it was stored or read last, where changes are told
        self.watched = math.inf  # the deadline that is noted, which is never later than its own; inf if there is none

    @property
    def span(self) -> int:
        """Return leading blocks that some tier holds."""
        most = 0
        for copy in self.copies:
            if copy.held > most:
                most = copy.held
        return most

    @property
    def is_inner(self) -> bool:
        """Return True if no tier could give up its end now, since something is held behind it."""
        return all(copy.children or not copy.held for copy in self.copies)

    def drop(self) -> None:
        """Let go of keys and copies once it is held nowhere. Copies refer to it: no cycle is left behind."""
        self.keys = []
        self.copies = []

    def path(self) -> list[Node]:
        """Return the nodes from the first block of the prompt to this one."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def split(self, blocks: int) -> Node:
        """Split off the leading blocks as a node of their own; return it. Who reads them goes on reading them."""
        sizes = [copy.size for copy in self.copies]
        behind = self.length - blocks
        head = Node(self.number, self.parent, blocks, self.tokens, self.end - behind * self.tokens, self.plain, sizes)
        head.ttl, head.expires, head.reads, head.used_at = self.ttl, self.expires, self.reads, self.used_at
        head.keys, self.keys = self.keys[:blocks], self.keys[blocks:]
        self.parent, self.length = head, behind
        for copy, first in zip(self.copies, head.copies, strict=True):
            first.held = min(copy.held, blocks)
            copy.held -= first.held
            first.used, first.floor, first.tenant, first.pins = copy.used, copy.floor, copy.tenant, copy.pins
            first.since = copy.since
            first.children = int(copy.held > 0)
            copy.parent = first
            if copy.partial:
                depths = copy.partial.items()
                first.pins += sum([depth >= blocks for _, depth in depths])
                first.read_part({reader: depth for reader, depth in depths if depth < blocks})
                copy.read_part({reader: max(0, depth - blocks) for reader, depth in depths})
        return head

"""Stored blocks as values: what a tier holds, and what came to it or left it. Times are seconds on the tree's clock.

Whoever keeps the bytes of blocks carries changes out in order, before it asks the tree for anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from warmkv.policies.prefix_tree.nodes import EXPIRED, Copy


class HeldBlock(NamedTuple):
    """Describe a stored block, a tail or column sums."""

    key: bytes
    parent: bytes  # key of the block before it; empty at the beginning of a prompt
    plain: int  # bytes uncompressed
    tokens: int  # 0 for column sums
    end: int  # tokens from the start of the prompt to its own end
    tenant: str
    ttl: float
    expires_at: float
    mark_ttl: float  # 0 where no breakpoint was written
    mark_expires_at: float
    reads: int
    used_at: float  # when it was stored or read last, in any tier; nan if unknown
    since: float  # when it came to this tier; nan if unknown

    def at(self, shift: float) -> HeldBlock:
        """Return it with times of a clock that shows so much more."""
        return self._replace(
            expires_at=self.expires_at + shift,
            mark_expires_at=self.mark_expires_at + shift,
            used_at=self.used_at + shift,
            since=self.since + shift,
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeldRun:
    """Describe blocks one behind the other that have one life, as a tier holds them."""

    keys: Sequence[bytes]
    parent: bytes  # key of the block before the first
    plain: int  # of each block, as `tokens`
    tokens: int
    end: int  # of the first block
    tenant: str
    ttl: float
    expires_at: float
    mark_ttl: float  # of the breakpoint at the end of the last block, as `mark_expires_at`
    mark_expires_at: float
    reads: int
    used_at: float
    since: float

    def blocks(self) -> Iterator[HeldBlock]:
        """Yield the blocks, the first one first."""
        parent, end, last = self.parent, self.end, len(self.keys) - 1
        for at, key in enumerate(self.keys):
            mark_ttl, mark_expires_at = (self.mark_ttl, self.mark_expires_at) if at == last else (0.0, EXPIRED)
            yield HeldBlock(
                key, parent, self.plain, self.tokens, end, self.tenant, self.ttl, self.expires_at, mark_ttl,
                mark_expires_at, self.reads, self.used_at, self.since,
            )  # fmt: skip
            parent, end = key, end + self.tokens


def run_of(copy: Copy, first: int, last: int) -> HeldRun:
    """Return blocks of a node with keys, from number `first` on and before `last`, as a tier holds them."""
    node = copy.node
    before = node.keys[first - 1] if first else node.parent.keys[-1] if node.parent is not None else b""
    marked = last == node.length
    return HeldRun(
        node.keys[first:last], before, node.plain, node.tokens, node.end - (node.length - first - 1) * node.tokens,
        copy.tenant, node.ttl, node.expires, node.mark_ttl if marked else 0.0,
        node.mark_expires if marked else EXPIRED, node.reads, node.used_at, copy.since,
    )  # fmt: skip


class Stored(NamedTuple):
    """Tell that computed blocks are kept in a tier."""

    run: HeldRun
    tier: int


class Copied(NamedTuple):
    """Tell that blocks of one tier are now in a lower one, too."""

    run: HeldRun
    source: int
    tier: int


class Left(NamedTuple):
    """Tell that a tier has given blocks up: to make room, because their TTL ran out, or since it was told to."""

    run: HeldRun
    tier: int
    why: Literal["evicted", "expired", "dropped"]


Change = Stored | Copied | Left

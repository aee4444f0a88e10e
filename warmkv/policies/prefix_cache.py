"""What a replica finds of a prompt and what it keeps of it: the rules, without the bytes.

The block store runs them with tensors, the simulator in virtual time. Full blocks are shared by all prompts that begin
alike; the partial tail before a breakpoint is kept as well, so that reuse at a breakpoint is exact to the token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from warmkv import pickling
from warmkv.config import PrefixCacheConfig
from warmkv.policies.prefix_tree.held import Change
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.policies.prefix_tree.tree import Path, Reading
from warmkv.policies.tiers import Tier, most_blocks
from warmkv.prefixes.record import Candidate, Mark


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long prefixes live, in seconds: by the TTL names of marks, and for blocks stored without one."""

    ttls: Mapping[str, float]
    default: float
    automatic: bool  # whether every full block is stored, or only those up to a mark

    @classmethod
    def of(cls, config: PrefixCacheConfig) -> Lifetimes:
        return cls(config.ttls, config.ttls[config.default_ttl], config.automatic)

    def stored_blocks(self, marks: Sequence[Mark], blocks: int, size: int) -> int:
        """Count the full blocks of a prompt, each of `size` tokens, that are stored when it is computed."""
        if self.automatic:
            return blocks
        return max((mark.position // size for mark in marks), default=0)


pickling.by_fields(Lifetimes)  # replicas get them with requests


@dataclass(frozen=True, slots=True)
class Match:
    """What is warm of a prompt. `chain` is pinned until `release`."""

    hit: int = 0  # position of the highest breakpoint that may be read; 0 if none
    blocks: int = 0  # leading full blocks that are resident
    tokens: int = 0  # leading tokens whose KV is resident, a tail included
    chain: tuple[bytes, ...] = ()  # keys that hold them
    reading: Reading | None = field(default=None, repr=False)  # what is pinned
    used_at: float = math.nan  # when the last of `chain` was used before
    ttl: float = 0.0  # seconds that the last of `chain` lives after each read


def sum_positions(tokens: int, size: int, marks: Sequence[Mark]) -> list[int]:
    """Return where column sums of a prompt are kept: at its marks, and at the ends of its last two blocks.

    Two, since the same prompt again must compute its last token anew.
    """
    blocks = {tokens // size * size, (tokens - 1) // size * size}
    return sorted({*blocks, *(mark.position for mark in marks)} - {0})


def sums_key(key: bytes) -> bytes:
    """Return the key under which the column sums of a prefix are kept, given the key of its last block or tail."""
    return hashlib.blake2b(key, digest_size=len(key), person=b"column sums").digest()


class PrefixCache:
    """Resident blocks and tails of one replica. `size` is always the tokens in a block, `now` seconds on one clock.

    What must be done with bytes is returned as changes, to be carried out in order before the next call.
    """

    def __init__(self, tiers: Sequence[Tier], token_bytes: int, lifetimes: Lifetimes, share: float = 0.0) -> None:
        self.tree = RadixTree(tiers, share)
        self._token_bytes, self._lifetimes = token_bytes, lifetimes

    def expire(self, now: float) -> list[Change]:
        """Drop what has outlived its TTL."""
        if self.tree.next_deadline > now:
            return []
        self.tree.expire(now)
        return self.tree.changes()

    def match(self, hashes: Sequence[bytes], reads: Sequence[Candidate], size: int, now: float) -> Match:
        """Look up the longest resident prefix of a prompt; refresh and pin it. What has expired is gone (`expire`).

        `reads` are the positions at which an earlier breakpoint may be read, highest first.
        """
        tree = self.tree
        path = tree.find(hashes)
        full = sum([node.length for node in path])
        chain, tokens, hit = tuple(hashes[:full]), full * size, 0
        tail = beside = None
        for read in reads:
            if read.position // size > full or (node := tree.marked(read.key, now)) is None:
                continue
            if read.position > tokens:
                tail, tokens = node, read.position
            elif not hit and read.position % size:
                beside = node
            hit = hit or read.position
        if beside is not None:  # the billed tail lies beside the chain that is reused; it is touched with the chain
            tree.touch([beside], now)
        if tail is not None:
            path.append(tail)
            chain = (*chain, *tail.keys)
        if not path:
            return Match()
        used_at, ttl = path[-1].used_at, path[-1].ttl
        return Match(hit, full, tokens, chain, tree.read(path, now), used_at, ttl)

    def release(self, match: Match) -> None:
        if match.reading is not None:
            self.tree.release(match.reading)

    def store(
        self,
        hashes: Sequence[bytes],
        marks: Sequence[Mark],
        size: int,
        now: float,
        tenant: str = "",
        match: Match | None = None,
        begun: float | None = None,
        lifetimes: Lifetimes | None = None,
    ) -> list[Change]:
        """Keep a computed prompt: its full blocks (unless automatic, up to the last mark) and the tails at marks.

        The lives of marks are counted from when the request began. What was found of the prompt (`match`) moves up to
        the first tier. `lifetimes` are the request's own, if it has any.
        """
        tree, lifetimes = self.tree, lifetimes or self._lifetimes
        tree.expire(now)
        if match is not None and match.chain and len(tree.spaces) > 1 and (path := tree.find(match.chain)):
            tree.promote(path, now)
        if lifetimes.automatic and hashes:
            tree.store(self._path(hashes, size), lifetimes.default, now, tenant)
        for mark in marks:
            blocks, rest = divmod(mark.position, size)
            path, ttl = self._path(hashes[:blocks], size), lifetimes.ttls[mark.ttl]
            if rest:
                path.append(tree.behind(path, [mark.key], rest, rest * self._token_bytes))
            if path and tree.store(path, ttl, now, tenant):
                tree.mark(path[-1], ttl, now if begun is None else begun)
        return tree.changes()

    def leaves(self, blocks: int, marks: Sequence[Mark], size: int, lifetimes: Lifetimes | None = None) -> int:
        """Count those of a prompt's leading full blocks that are stored once it is computed."""
        stored = (lifetimes or self._lifetimes).stored_blocks(marks, blocks, size)
        tiers = [space.tier for space in self.tree.spaces]
        return min(blocks, stored, most_blocks(tiers, size * self._token_bytes, size))

    def keep(self, chain: Sequence[bytes], size: int, ttl: float, now: float, tenant: str) -> list[Change]:
        """Keep a chain of full blocks that no request has written."""
        self.tree.expire(now)
        self.tree.store(self._path(chain, size), ttl, now, tenant)
        return self.tree.changes()

    def match_sums(self, match: Match, most: int, now: float) -> tuple[int, bytes]:
        """Return the longest part of a match within `most` tokens with resident column sums, and their key; or (0,
        b"").

        A rule that needs what all queries of a prompt gave its tokens can go on from there only.
        """
        for node in reversed(self.tree.find(match.chain)):
            if node.sums is not None and node.end <= most:
                self.tree.touch([node.sums], now)
                return node.end, node.sums.keys[0]
        return 0, b""

    def store_sums(
        self,
        hashes: Sequence[bytes],
        marks: Sequence[Mark],
        positions: Sequence[int],
        token_bytes: int,
        size: int,
        now: float,
        tenant: str = "",
        lifetimes: Lifetimes | None = None,
    ) -> list[Change]:
        """Keep the column sums of a stored prompt up to some positions, `token_bytes` for each token of them.

        Sums lie beside the block whose end they belong to, and leave before it.
        """
        lifetimes = lifetimes or self._lifetimes
        tails = {mark.position: mark.key for mark in marks}
        ttls = {mark.position: lifetimes.ttls[mark.ttl] for mark in marks}
        self.tree.expire(now)
        for position in positions:
            blocks, rest = divmod(position, size)
            chain = [*hashes[:blocks], tails[position]] if rest else hashes[:blocks]
            path = self.tree.find(chain)
            if not path or path[-1].end != position:
                continue
            path.append(self.tree.behind(path, [sums_key(chain[-1])], 0, position * token_bytes))
            self.tree.store(path, ttls.get(position, lifetimes.default), now, tenant)
        return self.tree.changes()

    def highest_mark(self, marks: Sequence[Mark], now: float) -> int:
        """Return position of the last of the marks that may be read now; 0 if none may."""
        return max((mark.position for mark in marks if self.tree.marked(mark.key, now) is not None), default=0)

    def _path(self, chain: Sequence[bytes], size: int) -> Path:
        return self.tree.path(chain, size, size * self._token_bytes)

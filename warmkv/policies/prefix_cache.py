"""What a replica finds of a prompt and what it keeps of it: the rules, without the bytes.

The block store runs them with tensors, the simulator in virtual time. Full blocks are shared by all prompts that begin
alike; the partial tail before a breakpoint is kept as well, so that reuse at a breakpoint is exact to the token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from warmkv import pickling
from warmkv.config import PrefixCacheConfig
from warmkv.policies.entry import Entry
from warmkv.policies.tiers import Step, Stored, Tier, Tiers
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
    held: Sequence[Sequence[Entry]] = field(default=(), repr=False)  # what is pinned, tier by tier
    used_at: float = math.nan  # when the last of `chain` was used before
    ttl: float = 0.0  # seconds that the last of `chain` lives after each read


class Span(NamedTuple):
    """A key and the tokens of the prompt that it holds."""

    key: bytes
    start: int
    end: int
    sums: bool = False  # whether it stands for column sums of these tokens rather than for their KV


def spans(chain: Sequence[bytes], tokens: int, size: int) -> list[Span]:
    """Return the blocks of a chain over the first `tokens` tokens of a prompt, the last of them as long as is left."""
    return [Span(key, at * size, min((at + 1) * size, tokens)) for at, key in enumerate(chain)]


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

    What must be done with bytes comes as steps (`tiers.Step`), to be carried out in order before the next call.
    """

    def __init__(self, tiers: Sequence[Tier], token_bytes: int, lifetimes: Lifetimes, share: float = 0.0) -> None:
        self.tiers = Tiers(tiers, share)
        self._token_bytes, self._lifetimes = token_bytes, lifetimes

    def match(self, hashes: Sequence[bytes], reads: Sequence[Candidate], size: int, now: float) -> Match:
        """Look up the longest resident prefix of a prompt; refresh and pin it.

        `reads` are the positions at which an earlier breakpoint may be read, highest first.
        """
        tiers = self.tiers
        full = max(index.match(hashes, now) for index in tiers.indexes)
        chain, tokens, hit, beside = tuple(hashes[:full]), full * size, 0, b""
        for read in reads:
            if read.position // size > full or not tiers.has_mark(read.key, now):
                continue
            if read.position > tokens:
                chain, tokens = (*hashes[:full], read.key), read.position
            elif not hit and read.position % size:
                beside = read.key
            hit = hit or read.position
        if beside:  # the billed tail lies beside the chain that is reused; its blocks are touched with the chain
            tiers.touch((beside,), now)
        last = tiers.entries(chain[-1]) if chain else []
        used_at = max((entry.used_at for entry in last), default=math.nan)
        ttl = max((entry.ttl for entry in last), default=0.0)
        tiers.touch(chain, now)
        return Match(hit, full, tokens, chain, tiers.pin(chain), used_at, ttl)

    def release(self, match: Match) -> None:
        if match.held:
            self.tiers.unpin(match.held)

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
    ) -> Iterator[tuple[Step, Span | None]]:
        """Keep a computed prompt: its full blocks (unless automatic, up to the last mark) and the tails at marks.

        The lives of marks are counted from when the request began. What was found of the prompt (`match`) moves up to
        the first tier. Yields steps, and what to store in those that store. `lifetimes` are the request's own, if it
        has any.
        """
        lifetimes = lifetimes or self._lifetimes
        if match is not None and match.chain:
            steps = self.tiers.promote(match.chain, now)
            yield from _with_spans(steps, lambda: spans(match.chain, match.tokens, size))
        if lifetimes.automatic:
            yield from self._keep(hashes, len(hashes) * size, size, lifetimes.default, now, tenant)
        for mark in marks:
            blocks, rest = divmod(mark.position, size)
            chain = (*hashes[:blocks], mark.key) if rest else hashes[:blocks]
            ttl = lifetimes.ttls[mark.ttl]
            yield from self._keep(chain, mark.position, size, ttl, now, tenant)
            self.tiers.mark(mark.key, ttl, now if begun is None else begun)

    def match_sums(self, match: Match, size: int, most: int, now: float) -> tuple[int, bytes]:
        """Return the longest part of a match within `most` tokens with resident column sums, and their key; or (0,
        b"").

        A rule that needs what all queries of a prompt gave its tokens can go on from there only.
        """
        for at in range(len(match.chain) - 1, -1, -1):
            end = match.tokens if at == len(match.chain) - 1 else (at + 1) * size
            key = sums_key(match.chain[at])
            if end <= most and key in self.tiers:
                self.tiers.touch((key,), now)
                return end, key
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
    ) -> Iterator[tuple[Step, Span | None]]:
        """Keep the column sums of a stored prompt up to some positions, `token_bytes` for each token of them.

        Yields as `store` does. Sums lie beside the block whose end they belong to, and leave before it.
        """
        lifetimes = lifetimes or self._lifetimes
        tails = {mark.position: mark.key for mark in marks}
        ttls = {mark.position: lifetimes.ttls[mark.ttl] for mark in marks}
        for position in positions:
            blocks, rest = divmod(position, size)
            chain = (*hashes[:blocks], tails[position]) if rest else tuple(hashes[:blocks])
            if not chain or self.tiers.match(chain, now) < len(chain):
                continue
            key, ttl = sums_key(chain[-1]), ttls.get(position, lifetimes.default)
            sizes, tokens = self._sizes(chain, position, size)
            sizes, tokens = [*sizes, position * token_bytes], [*tokens, 0]
            steps = self.tiers.store((*chain, key), sizes, tokens, ttl, now, tenant)
            known = partial(_spans_and_sums, chain, position, size, key)
            yield from _with_spans(steps, known)

    def highest_mark(self, marks: Sequence[Mark], now: float) -> int:
        """Return position of the last of the marks that may be read now; 0 if none may."""
        return max((mark.position for mark in marks if self.tiers.has_mark(mark.key, now)), default=0)

    def _keep(
        self, chain: Sequence[bytes], position: int, size: int, ttl: float, now: float, tenant: str
    ) -> Iterator[tuple[Step, Span | None]]:
        sizes, tokens = self._sizes(chain, position, size)
        steps = self.tiers.store(chain, sizes, tokens, ttl, now, tenant)
        yield from _with_spans(steps, lambda: spans(chain, position, size))

    def _sizes(self, chain: Sequence[bytes], position: int, size: int) -> tuple[list[int], list[int]]:
        """Return plain bytes and tokens of the blocks of a chain."""
        tokens = [size] * len(chain)
        if chain:
            tokens[-1] = position - (len(chain) - 1) * size
        return [count * self._token_bytes for count in tokens], tokens


def _spans_and_sums(chain: Sequence[bytes], position: int, size: int, key: bytes) -> list[Span]:
    return [*spans(chain, position, size), Span(key, 0, position, sums=True)]


def _with_spans(steps: Iterator[Step], known: Callable[[], Sequence[Span]]) -> Iterator[tuple[Step, Span | None]]:
    """Yield steps, those that store with their spans; `known` is asked once something is stored."""
    by_key: dict[bytes, Span] = {}
    for step in steps:
        if isinstance(step, Stored):
            by_key = by_key or {span.key: span for span in known()}
            yield step, by_key[step.key]
        else:
            yield step, None

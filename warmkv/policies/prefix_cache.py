"""What a replica finds of a prompt and what it keeps of it: the rules, without the bytes.

The block store runs them with tensors, the simulator in virtual time. Full blocks are shared by all prompts that begin
alike; the partial tail before a breakpoint is kept as well, so that reuse at a breakpoint is exact to the token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from warmkv.config import PrefixCacheConfig
from warmkv.policies.retention import Admission, BlockLedger
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


@dataclass(frozen=True, slots=True)
class Match:
    """What is warm of a prompt. `chain` is pinned until `release`."""

    hit: int = 0  # position of the highest breakpoint that may be read; 0 if none
    blocks: int = 0  # leading full blocks that are resident
    tokens: int = 0  # leading tokens whose KV is resident, a tail included
    chain: tuple[bytes, ...] = ()  # keys that hold them


@dataclass(frozen=True, slots=True)
class Span:
    """A key and the tokens of the prompt that it holds."""

    key: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Change:
    """What keeping one chain did, in the order to apply it: first what left, then what came."""

    evicted: Sequence[bytes]
    stored: Sequence[Span]


def sum_positions(tokens: int, size: int, marks: Sequence[Mark]) -> list[int]:
    """Where column sums of a prompt are kept: at its marks, and at the ends of its last two blocks.

    Two, since the same prompt again must compute its last token anew.
    """
    blocks = {tokens // size * size, (tokens - 1) // size * size}
    return sorted({*blocks, *(mark.position for mark in marks)} - {0})


def sums_key(key: bytes) -> bytes:
    """The key under which the column sums of a prefix are kept, given the key of its last block or tail."""
    return hashlib.blake2b(key, digest_size=len(key), person=b"column sums").digest()


class PrefixCache:
    """Resident blocks and tails of one replica. `size` is always the tokens in a block, `now` seconds on one clock."""

    def __init__(self, capacity: int, token_bytes: int, lifetimes: Lifetimes) -> None:
        self.ledger = BlockLedger(capacity)
        self._token_bytes, self._lifetimes = token_bytes, lifetimes

    def match(self, hashes: Sequence[bytes], reads: Sequence[Candidate], size: int, now: float) -> Match:
        """The longest resident prefix of a prompt; notes the read and pins what was found.

        `reads` are the positions at which an earlier breakpoint may be read, highest first.
        """
        ledger = self.ledger
        full = ledger.match(hashes, now)
        chain, tokens, hit, beside = tuple(hashes[:full]), full * size, 0, b""
        for read in reads:
            if read.position // size > full or not ledger.has_mark(read.key, now):
                continue
            if read.position > tokens:
                chain, tokens = (*hashes[:full], read.key), read.position
            elif not hit and read.position % size:
                beside = read.key
            hit = hit or read.position
        if beside:  # the billed tail lies beside the chain that is reused; its blocks are touched with the chain
            ledger.touch((beside,), now)
        ledger.touch(chain, now)
        ledger.pin(chain)
        return Match(hit, full, tokens, chain)

    def release(self, match: Match) -> None:
        self.ledger.unpin(match.chain)

    def store(self, hashes: Sequence[bytes], marks: Sequence[Mark], size: int, now: float) -> Iterator[Change]:
        """Keep a computed prompt: its full blocks (unless automatic, up to the last mark) and the tails at marks."""
        lifetimes = self._lifetimes
        if lifetimes.automatic:
            yield self._keep(hashes, 0, size, lifetimes.default, now)
        for mark in marks:
            blocks, rest = divmod(mark.position, size)
            chain = (*hashes[:blocks], mark.key) if rest else hashes[:blocks]
            ttl = lifetimes.ttls[mark.ttl]
            yield self._keep(chain, rest, size, ttl, now)
            if mark.key in self.ledger:
                self.ledger.mark(mark.key, ttl, now)

    def match_sums(self, match: Match, size: int, most: int, now: float) -> tuple[int, bytes]:
        """The longest part of a match within `most` tokens whose column sums are resident, and their key; or (0, b"").

        A rule that needs what all queries of a prompt gave its tokens can go on from there only.
        """
        for at in range(len(match.chain) - 1, -1, -1):
            end = match.tokens if at == len(match.chain) - 1 else (at + 1) * size
            key = sums_key(match.chain[at])
            if end <= most and key in self.ledger:
                self.ledger.touch((key,), now)
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
    ) -> Iterator[tuple[int, bytes, Admission]]:
        """Keep the column sums of a stored prompt up to some positions, `token_bytes` for each token of them.

        Yields (position, key, what that did). They lie beside the block whose end they belong to, and leave before it.
        """
        tails = {mark.position: mark.key for mark in marks}
        ttls = {mark.position: self._lifetimes.ttls[mark.ttl] for mark in marks}
        for position in positions:
            blocks, rest = divmod(position, size)
            chain = (*hashes[:blocks], tails[position]) if rest else tuple(hashes[:blocks])
            if chain and self.ledger.match(chain, now) == len(chain):
                key, sizes = sums_key(chain[-1]), [0] * len(chain) + [position * token_bytes]
                yield (
                    position,
                    key,
                    self.ledger.store((*chain, key), sizes, ttls.get(position, self._lifetimes.default), now),
                )

    def highest_mark(self, marks: Sequence[Mark], now: float) -> int:
        """Position of the last of the marks that may be read now; 0 if none may."""
        return max((mark.position for mark in marks if self.ledger.has_mark(mark.key, now)), default=0)

    def _keep(self, chain: Sequence[bytes], tail: int, size: int, ttl: float, now: float) -> Change:
        lengths = [size] * len(chain)
        if tail:
            lengths[-1] = tail
        admission = self.ledger.store(chain, [length * self._token_bytes for length in lengths], ttl, now)
        if not admission.stored:
            return Change(admission.evicted, ())
        first = chain.index(
            admission.stored[0]
        )  # what is stored is a run of the chain: the rest was there or did not fit
        spans = [
            Span(key, (first + i) * size, (first + i) * size + lengths[first + i])
            for i, key in enumerate(admission.stored)
        ]
        return Change(admission.evicted, spans)

"""Moving warm blocks between replicas: from whom to fetch, and whether that is faster than to compute. Pure.

The router names a donor by what its index says and by configured costs (`choose_donor`). The replica that gets the
request decides by what it lacks and by times that it measured itself (`TransferTimes`). The simulator does both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from warmkv.config import Config, RoutingConfig
from warmkv.prefixes.index import Depths

TRANSFER_BLOCK, TRANSFER_START = 0.25, 4.0  # blocks of prefill that fetching one counts as, and any fetch besides
CONCURRENT = 4  # fetches that a replica makes, and answers, at a time
PIECE_BYTES = 32 << 20  # most that a replica hands out at a time
HANDOVER_BYTES = 256 << 20  # most that a replica which is stopped hands over
TOKEN_SECONDS = 0.0001  # of prefill, a token: a guess, which holds until a replica has measured
START_SECONDS = 0.02  # of a fetch, whatever its size: likewise, and in a replay
TRANSFER_MIN_BLOCKS = 8  # fewest that are worth a fetch
PRIOR_TOKENS, PRIOR_BYTES = 512, 8 << 20
"""Of a usual prefill and a usual fetch: how far from a guessed line measurements must spread to outweigh its slope."""


HALF_LIFE = 8.0
"""Measurements after which an older one counts half."""


PATIENCE = 8
"""How much less than a measurement a fetch counts that was not made."""


class Fetch(NamedTuple):
    """A replica where a request's prefix is warm; another that gets the request may fetch missing blocks from it."""

    donor: str
    blocks: int  # leading full blocks that the donor holds in memory
    always: bool = False  # fetch also where computing is expected to be faster


def choose_donor(
    replicas: Sequence[str], warm: dict[str, Depths], load: dict[str, int], config: RoutingConfig
) -> Fetch | None:
    """Choose the replica to fetch from: the one that holds most in memory, among equals the least loaded.

    It holds for every other replica, since Serve may take another than the best. None if no replica would gain.
    """
    transfer = config.transfer
    if not transfer or not warm:
        return None
    donor, blocks, least = "", 0, 0
    for name in replicas:
        depths = warm.get(name)
        if depths is None:
            continue
        held = depths[1]
        if held > blocks or (held == blocks and load.get(name, 0) < least):
            donor, blocks, least = name, held, load.get(name, 0)
    return Fetch(donor, blocks, transfer == "always") if blocks and blocks >= worth_fetching() else None


def worth_fetching() -> float:
    """Return the blocks from which on fetching them costs less than computing them."""
    return max(TRANSFER_MIN_BLOCKS, TRANSFER_START / (1 - TRANSFER_BLOCK))


def pieces(sizes: Iterable[int], most: int) -> Iterator[range]:
    """Yield the items that go together, in their order: at most `most` bytes, or one that is larger by itself."""
    begin = end = total = 0
    for size in sizes:
        if end > begin and total + size > most:
            yield range(begin, end)
            begin, total = end, 0
        end, total = end + 1, total + size
    if end > begin:
        yield range(begin, end)


def choose_successor(
    chain: Sequence[bytes], peers: Sequence[str], holders: Mapping[bytes, Sequence[str]]
) -> tuple[str, int]:
    """Choose who takes a chain over from a replica that stops, and how many of its first keys that one holds already.

    Return the holder of most of it, so that it stays together; else rendezvous hashing of its first key, so that
    chains that begin alike stay together, and all are spread.
    """
    for held in range(len(chain), 0, -1):
        if known := [peer for peer in holders.get(chain[held - 1], ()) if peer in peers]:
            return min(known), held
    return max(peers, key=lambda peer: hashlib.blake2b(chain[0] + peer.encode(), digest_size=8).digest()), 0


@dataclass(frozen=True, slots=True)
class RunningLine:
    """seconds = start + each * amount, fitted to measurements of which later ones count more; neither is negative.

    The slope is that of exponentially weighted least squares, drawn towards a guess as long as amounts hardly differ.
    """

    guess: float  # of `each`
    spread: float  # of amounts, at which guess and measurements count alike
    amount: float  # running means
    seconds: float
    variance: float = 0.0  # of amounts
    covariance: float = 0.0  # of amounts and seconds

    @classmethod
    def guessed(cls, start: float, each: float, amount: float) -> RunningLine:
        """Start from a guess; `amount` is a typical one."""
        return cls(each, amount / 8, amount, start + each * amount)

    def measured(self, amount: float, seconds: float, half_life: float) -> RunningLine:
        """Return the estimate with one more measurement; after `half_life` others it will count half as much."""
        weight = 1 - 0.5 ** (1 / half_life)
        more, longer = amount - self.amount, seconds - self.seconds
        return RunningLine(
            self.guess,
            self.spread,
            amount=self.amount + weight * more,
            seconds=self.seconds + weight * longer,
            variance=(1 - weight) * (self.variance + weight * more * more),
            covariance=(1 - weight) * (self.covariance + weight * more * longer),
        )

    @property
    def each(self) -> float:
        pull = self.spread**2
        slope = (self.covariance + pull * self.guess) / (self.variance + pull)
        return min(max(slope, 0.0), self.seconds / self.amount)

    @property
    def start(self) -> float:
        return max(0.0, self.seconds - self.each * self.amount)


@dataclass(frozen=True, slots=True)
class TransferTerms:
    """Time limits of fetching and handing over, bytes of a piece, and the seconds that are guessed or simulated."""

    timeout_seconds: float
    handover_seconds: float
    piece_bytes: int
    token_seconds: float
    start_seconds: float
    byte_seconds: float

    @classmethod
    def of(cls, config: Config) -> TransferTerms:
        gateway, cluster = config.gateway, config.cluster
        times = (TOKEN_SECONDS, START_SECONDS, config.transfer.byte_seconds)
        moves = config.engine.capabilities(config.prefix_cache.storage).moves_blocks
        return cls(gateway.fetch_seconds, cluster.handover_seconds if moves else 0.0, PIECE_BYTES, *times)


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """What a replica knows of its own speed: seconds of prefill by tokens, seconds of a fetch by bytes."""

    terms: TransferTerms
    prefill: RunningLine
    fetch: RunningLine

    @classmethod
    def of(cls, terms: TransferTerms) -> TransferTimes:
        return cls(
            terms,
            RunningLine.guessed(0.0, terms.token_seconds, PRIOR_TOKENS),
            RunningLine.guessed(terms.start_seconds, terms.byte_seconds, PRIOR_BYTES),
        )

    def computed(self, tokens: int, seconds: float) -> TransferTimes:
        """Learn from a prefill of `tokens` tokens."""
        prefill = self.prefill.measured(tokens, seconds, HALF_LIFE)
        return replace(self, prefill=prefill)

    def fetched(self, nbytes: int, seconds: float) -> TransferTimes:
        """Learn from a fetch of `nbytes` bytes."""
        return replace(self, fetch=self.fetch.measured(nbytes, seconds, HALF_LIFE))

    def declined(self) -> TransferTimes:
        """Decay the estimate after a declined fetch, so that fetching is tried again."""
        guess = self.terms.start_seconds + self.terms.byte_seconds * PRIOR_BYTES
        return replace(self, fetch=self.fetch.measured(PRIOR_BYTES, guess, PATIENCE * HALF_LIFE))

    def gain(self, tokens: int, nbytes: int) -> float:
        """Return seconds that fetching these tokens saves; negative if computing them is faster."""
        return self.prefill.each * tokens - self.fetch.start - self.fetch.each * nbytes

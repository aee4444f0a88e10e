"""Eviction orders as values: the replica's store and the simulator share them.

An order gives a block a priority, a tuple of numbers; the least goes first. It only ever chooses among the ends of
chains without readers (`prefix_tree`), so that what remains can always be reached from its beginning.

Orders by worth age: a block's worth is added to the priority of what was given up last when the block was used, so what
was worth much long ago goes before what is worth something now (Greedy-Dual-Size-Frequency, Cherkasova, 1998).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from warmkv.config import Eviction

READS_APART = 16
"""Blocks that were read more often than this are taken together when the chance of another read is estimated."""


class EvictionCandidate(Protocol):
    """What an order may look at."""

    @property
    def size(self) -> int:
        """Return bytes."""
        ...

    @property
    def tokens(self) -> int:
        """Return tokens in the block; 0 where an entry holds no KV."""
        ...

    @property
    def end(self) -> int:
        """Return tokens from the start of the prompt to the end of the block."""
        ...

    @property
    def reads(self) -> int:
        """Return how often it was read since it was stored."""
        ...

    @property
    def used(self) -> int:
        """Return a number that counts up with every use of any block."""
        ...

    @property
    def floor(self) -> float:
        """Return the priority of what had been given up last when the block was used."""
        ...


@dataclass(slots=True)
class Reuse:
    """How likely a block is read once more before it leaves, by how often it was read: as observed.

    A block that is not read for its TTL leaves, so this is the probability of reuse within its TTL.
    """

    again: list[int] = field(default_factory=lambda: [0] * READS_APART)
    never: list[int] = field(default_factory=lambda: [0] * READS_APART)

    def probability(self, reads: int) -> float:
        """Estimate by Laplace's rule of succession; what was read more often starts at the probability of what was read
        less.
        """
        found = 0.5
        for at in range(min(reads, READS_APART - 1) + 1):
            found = (self.again[at] + 2 * found) / (self.again[at] + self.never[at] + 2)
        return found


Cost = Callable[[int, int], float]
"""What it takes to compute `tokens` tokens anew that end at position `end`, in any unit."""
Order = Callable[[EvictionCandidate, Reuse], tuple[float, ...]]


def lru(block: EvictionCandidate, reuse: Reuse) -> tuple[float, ...]:
    """Order the least recently used first."""
    return (block.used,)


def lfu(block: EvictionCandidate, reuse: Reuse) -> tuple[float, ...]:
    """Order the least often read first, then the least recently used; reads count less the longer they are ago."""
    return (block.floor + 1 + block.reads, block.used)


def length(block: EvictionCandidate, reuse: Reuse) -> tuple[float, ...]:
    """Evict ends of long prefixes first, the least recently used among equals: beginnings are shared most."""
    return (block.floor + 1 / block.end, block.used)


@dataclass(frozen=True, slots=True)
class CostAware:
    """What is cheapest to lose goes first: recompute cost x probability of reuse within its TTL, per byte.

    The worth of an object by Greedy-Dual-Size-Frequency, with an observed probability in place of the count. It is
    computed when the block is used, so losing a block takes no look at the others.
    """

    cost: Cost

    def __call__(self, block: EvictionCandidate, reuse: Reuse) -> tuple[float, ...]:
        lost = self.cost(block.tokens, block.end) * reuse.probability(block.reads)
        return (block.floor + lost / max(1, block.size), block.used)


ATTENTION_TOKENS = 8192  # prompt tokens before a token that double its cost


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Relative cost of prefill: a token costs 1, and once more for every `attention_tokens` tokens before it."""

    attention_tokens: int = ATTENTION_TOKENS

    def __call__(self, tokens: int, end: int) -> float:
        return tokens * (1 + (end - tokens / 2) / self.attention_tokens)


def order(name: Eviction, cost: Cost) -> Order:
    """Return the order of that name; `cost` is for `cost` only."""
    orders: dict[Eviction, Order] = {"lru": lru, "lfu": lfu, "length": length, "cost": CostAware(cost)}
    return orders[name]

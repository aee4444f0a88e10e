"""Samples of how long blocks stay and how soon they are read again, which a TTL is chosen by."""

from __future__ import annotations

import math
from collections import deque

SAMPLE_EVERY = 16
"""Of the blocks that leave a tier one in so many is observed, the first among them: thousands may leave in a step."""

MOST = 1024
"""Samples of each kind that are kept from one report to the next; older ones are given up."""


class Residency:
    """What the engine's thread observes, until `metrics.record` takes it from another one. Times in seconds."""

    def __init__(self) -> None:
        self.lifetimes: deque[tuple[str, float]] = deque(maxlen=MOST)  # tier; from storing to leaving it
        self.idle: deque[tuple[str, float]] = deque(maxlen=MOST)  # tier; from the last use to an eviction
        self.gaps: deque[float] = deque(maxlen=MOST)  # between two uses of a prefix, one for each prompt that reuses it
        self._removed = 0

    def reused(self, used_at: float, now: float) -> None:
        """Note that a prefix is read which was used last at `used_at`."""
        if not math.isnan(used_at):
            self.gaps.append(now - used_at)

    def removed(self, blocks: int, used_at: float, since: float, tier: str, now: float, *, evicted: bool) -> None:
        """Note that blocks of one life leave a tier: evicted, or because their TTL ran out."""
        observed = _samples(self._removed + blocks) - _samples(self._removed)
        self._removed += blocks
        if not math.isnan(since):
            self.lifetimes.extend([(tier, now - since)] * observed)
        if evicted and not math.isnan(used_at):
            self.idle.extend([(tier, now - used_at)] * observed)


def _samples(blocks: int) -> int:
    """Return how many of the first blocks that leave are observed."""
    return -(-blocks // SAMPLE_EVERY)

"""Sample how long blocks stay in a tier and how soon they are reused, for choosing a TTL."""

from __future__ import annotations

import math
from collections import deque

SAMPLE_EVERY = 16
"""Of the blocks that leave a tier one in so many is observed, the first among them: thousands may leave in a step."""

MOST = 1024
"""Samples of each kind that are kept from one report to the next; older ones are given up."""


class Residency:
    """Samples in seconds, observed by the engine's thread and taken by `metrics.record` from another one."""

    def __init__(self) -> None:
        self.lifetimes: deque[tuple[str, float]] = deque(maxlen=MOST)  # tier; from storing to leaving it
        self.idle: deque[tuple[str, float]] = deque(maxlen=MOST)  # tier; from the last use to an eviction
        self.gaps: deque[float] = deque(maxlen=MOST)  # between two uses of a prefix, one for each prompt that reuses it
        self._removed = 0

    def reused(self, used_at: float, now: float) -> None:
        """Record the reuse of a prefix that was last used at `used_at`."""
        if not math.isnan(used_at):
            self.gaps.append(now - used_at)

    def removed(self, blocks: int, used_at: float, since: float, tier: str, now: float, *, evicted: bool) -> None:
        """Record that blocks of one life leave a tier: evicted, or because their TTL ran out."""
        observed = _samples(self._removed + blocks) - _samples(self._removed)
        self._removed += blocks
        if not math.isnan(since):
            self.lifetimes.extend([(tier, now - since)] * observed)
        if evicted and not math.isnan(used_at):
            self.idle.extend([(tier, now - used_at)] * observed)


def _samples(blocks: int) -> int:
    """Return how many of the first blocks that leave are observed."""
    return -(-blocks // SAMPLE_EVERY)

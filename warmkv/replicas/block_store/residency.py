"""Samples of how long blocks stay and how soon they are read again, which a TTL is chosen by."""

from __future__ import annotations

import math
from collections import deque

from warmkv.policies.entry import Entry

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
        self._left = 0

    def reused(self, used_at: float, now: float) -> None:
        """Note that a prefix is read which was used last at `used_at`."""
        if not math.isnan(used_at):
            self.gaps.append(now - used_at)

    def left(self, entry: Entry, tier: str, now: float, *, evicted: bool) -> None:
        """Note that a block leaves a tier: evicted, or because its TTL ran out."""
        self._left += 1
        if self._left % SAMPLE_EVERY != 1:
            return
        if not math.isnan(entry.since):
            self.lifetimes.append((tier, now - entry.since))
        if evicted and not math.isnan(entry.used_at):
            self.idle.append((tier, now - entry.used_at))

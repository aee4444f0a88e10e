"""A figure that was measured several times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements, all in the same unit."""

    median: float
    least: float
    most: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of values. Raises ValueError if there is none."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    @property
    def share(self) -> float:
        """Return half the range as a share of the median."""
        return (self.most - self.least) / 2 / self.median if self.median else 0.0

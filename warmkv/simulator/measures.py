"""What a simulation measures: levels over time, and percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Level:
    """A quantity that changes in steps: its value, its peak and its mean over time.

    Changes may be reported out of order; the mean is exact all the same, the peak is that of the order reported.
    """

    def __init__(self) -> None:
        self.value = 0
        self.peak = 0
        self._moment = 0.0  # sum of change * time of change

    def change(self, amount: int, at: float) -> None:
        self.value += amount
        self._moment += amount * at
        if self.value > self.peak:
            self.peak = self.value

    def mean(self, end: float) -> float:
        """Mean from time 0 to `end`, the level having started at 0."""
        return max(0.0, self.value - self._moment / end) if end > 0 else float(self.value)


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


def percentiles(values: Sequence[float]) -> Percentiles:
    """p50, p90 and p99 with linear interpolation; zeros if there are no values."""
    import numpy as np

    if not len(values):
        return Percentiles()
    return Percentiles(*(float(value) for value in np.percentile(np.asarray(values), (50, 90, 99))))

"""What a simulation measures: levels over time, and percentiles."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TimeWeightedGauge:
    """A quantity that changes in steps: its value, its peak, its mean over time, and what it was at any time.

    Changes may be reported out of order; mean and peak are exact all the same. Those of one time count in the order
    reported.
    """

    def __init__(self) -> None:
        self._times, self._changes = array("d"), array("q")

    @classmethod
    def together(cls, gauges: Iterable[TimeWeightedGauge]) -> TimeWeightedGauge:
        """Return the sum of some gauges."""
        found = cls()
        for gauge in gauges:
            found._times += gauge._times
            found._changes += gauge._changes
        return found

    def change(self, amount: int, at: float) -> None:
        self._times.append(at)
        self._changes.append(amount)

    @property
    def value(self) -> int:
        return sum(self._changes)

    @property
    def peak(self) -> int:
        import numpy as np

        order = np.argsort(np.array(self._times), kind="stable")
        return int(np.cumsum(np.array(self._changes, dtype=np.int64)[order]).max(initial=0))

    def mean(self, end: float) -> float:
        """Return mean from time 0 to `end`, the level having started at 0."""
        import numpy as np

        if not self._times or end <= 0:
            return float(self.value)
        times, changes = np.frombuffer(self._times), np.frombuffer(self._changes, dtype=np.int64)
        moment = float(np.dot(times, changes))  # sum of change * time of change
        return max(0.0, int(changes.sum()) - moment / end)

    def at(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the level at each of these times, changes of that moment included."""
        import numpy as np

        moments = np.array(self._times)
        order = np.argsort(moments, kind="stable")
        levels = np.concatenate([[0], np.cumsum(np.array(self._changes, dtype=np.int64)[order])])
        found: NDArray[np.int64] = levels[np.searchsorted(moments[order], times, side="right")]
        return found


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> Percentiles:
    """Return p50, p90, p95 and p99 with linear interpolation; zeros if there are no values."""
    import numpy as np

    if not len(values):
        return Percentiles()
    return Percentiles(*(float(value) for value in np.percentile(np.asarray(values), (50, 90, 95, 99))))

"""How many replicas a simulated cluster is to have: the requests in flight as Serve measures them, and its rule."""

from __future__ import annotations

from collections import deque

from warmkv.config import AutoscalingConfig
from warmkv.policies.autoscaling import Scaling, decide

REPORT_SECONDS = 10.0  # between two reports of the requests in flight (Ray Serve 2.60)


class Autoscaler:
    """Follows the requests in flight from time 0 on. Between two reports it decides by the last one."""

    def __init__(self, config: AutoscalingConfig, replicas: int) -> None:
        self._config, self._scaling = config, Scaling(replicas)
        self._changes: deque[tuple[float, int]] = deque([(0.0, 0)])  # when there were how many, within the look-back
        self._ongoing = 0.0  # on average, as last reported

    @property
    def due(self) -> float:
        """When it will decide otherwise, unless a report comes before."""
        return self._scaling.due(self._config)

    def changed(self, by: int, now: float) -> None:
        """Requests came, or ended."""
        self._changes.append((now, self._changes[-1][1] + by))

    def report(self, now: float) -> int:
        """The replicas that are wanted by the mean over the look-back time."""
        start = max(0.0, now - self._config.look_back_seconds)
        changes = self._changes
        while len(changes) > 1 and changes[1][0] <= start:
            changes.popleft()
        total, end = 0.0, now
        for at, count in reversed(changes):
            total += count * (end - max(at, start))
            end = max(at, start)
        self._ongoing = total / (now - start)
        return self.decide(now)

    def decide(self, now: float) -> int:
        """The replicas that are wanted by the last report."""
        self._scaling = decide(self._scaling, self._ongoing, self._config, now)
        return self._scaling.target

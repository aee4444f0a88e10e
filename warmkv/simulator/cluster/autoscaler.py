"""Replicas of a simulated cluster by the rule of Ray Serve's default autoscaling.

Serve divides the requests in flight, averaged over a time, by the target per replica. It starts or stops replicas once
that has been more, or fewer, than there are for a delay without a break (ray 2.60, `serve/autoscaling_policy.py`, with
factors of 1).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from warmkv.config import AutoscalingConfig

REPORT_SECONDS = 10.0  # between two reports of the requests in flight (Ray Serve 2.60)
EARLY = 1e-6  # seconds by which a delay may seem too short, by rounding, and is over all the same


@dataclass(frozen=True, slots=True)
class Scaling:
    """The replicas that are wanted, and since when it seems that there should be more (1) or fewer (-1)."""

    target: int
    direction: int = 0
    since: float = 0.0

    def due(self, config: AutoscalingConfig) -> float:
        """Return when the target changes, if requests stay as they are; infinite if it does not."""
        if not self.direction:
            return math.inf
        return self.since + (config.upscale_delay_seconds if self.direction > 0 else config.downscale_delay_seconds)


def decide(scaling: Scaling, ongoing: float, config: AutoscalingConfig, now: float) -> Scaling:
    """Decide the replicas wanted for `ongoing` requests in flight on average. `now` never goes back."""
    wanted = math.ceil(ongoing / config.target_ongoing_requests)
    direction = (wanted > scaling.target) - (wanted < scaling.target)
    if direction != scaling.direction:
        scaling = Scaling(scaling.target, direction, now)
    if now + EARLY < scaling.due(config):
        return scaling
    return Scaling(min(max(wanted, config.min_replicas), config.max_replicas))


class Autoscaler:
    """Follows the requests in flight from time 0 on. Between two reports it decides by the last one."""

    def __init__(self, config: AutoscalingConfig, replicas: int) -> None:
        self._config, self._scaling = config, Scaling(replicas)
        self._changes: deque[tuple[float, int]] = deque([(0.0, 0)])  # when there were how many, within the look-back
        self.ongoing = 0.0  # on average, as last reported

    @property
    def due(self) -> float:
        """Return the time of its next decision, unless a report comes before."""
        return self._scaling.due(self._config)

    def changed(self, by: int, now: float) -> None:
        """Count requests that came or ended."""
        self._changes.append((now, self._changes[-1][1] + by))

    def report(self, now: float) -> int:
        """Return the replicas wanted by the mean over the look-back time."""
        start = max(0.0, now - self._config.look_back_seconds)
        changes = self._changes
        while len(changes) > 1 and changes[1][0] <= start:
            changes.popleft()
        total, end = 0.0, now
        for at, count in reversed(changes):
            total += count * (end - max(at, start))
            end = max(at, start)
        self.ongoing = total / (now - start)
        return self.decide(now)

    def decide(self, now: float) -> int:
        """Return the replicas wanted by the last report."""
        self._scaling = decide(self._scaling, self.ongoing, self._config, now)
        return self._scaling.target

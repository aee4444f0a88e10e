"""How many replicas there should be: the rule of Ray Serve's default autoscaling, for the simulator. Pure.

Serve divides the requests in flight, averaged over a time, by what a replica is meant to have. It starts or stops
replicas once that has been more, or fewer, than there are for a while without a break (ray 2.60,
`serve/autoscaling_policy.py`, with factors of 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warmkv.config import AutoscalingConfig

EARLY = 1e-6  # seconds by which a delay may seem too short, by rounding, and is over all the same


@dataclass(frozen=True, slots=True)
class Scaling:
    """The replicas that are wanted, and since when it seems that there should be more (1) or fewer (-1)."""

    target: int
    direction: int = 0
    since: float = 0.0

    def due(self, config: AutoscalingConfig) -> float:
        """When the target changes, if requests stay as they are; infinite if it does not."""
        if not self.direction:
            return math.inf
        return self.since + (config.upscale_delay_seconds if self.direction > 0 else config.downscale_delay_seconds)


def decide(scaling: Scaling, ongoing: float, config: AutoscalingConfig, now: float) -> Scaling:
    """What is wanted now that `ongoing` requests are in flight on average. `now` never goes back."""
    wanted = math.ceil(ongoing / config.target_ongoing_requests)
    direction = (wanted > scaling.target) - (wanted < scaling.target)
    if direction != scaling.direction:
        scaling = Scaling(scaling.target, direction, now)
    if now + EARLY < scaling.due(config):
        return scaling
    return Scaling(min(max(wanted, config.min_replicas), config.max_replicas))

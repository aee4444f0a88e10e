"""SnapKV, whose heads share the budget of a layer."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from tests.unit.replicas.slow_methods import best
from tests.unit.replicas.slow_methods.snapkv import ends, scores

__all__ = ["KEPT", "SERVED", "choose", "ends", "scores"]

KEPT = [
    "adakv@14:window=4",
    "adakv@0.3:window=3,floor=0.5,kernel=1",
    "adakv@12:window=3,floor=0",
    "adakv@0.3:window=3,floor=1",
]
SERVED = ["adakv@16:window=4", "adakv@16+argmin:window=4"]


def choose(spec: Any, scores: list[dict[int, float]], left: int) -> list[list[int]]:
    """Return heads keep what they win of the layer's best, drawn towards an even share by the safeguard."""
    everything = [(-score, head, position) for head, own in enumerate(scores) for position, score in own.items()]
    winners = [head for _, head, _ in sorted(everything)[: len(scores) * left]]
    alpha = Fraction(str(spec.floor))
    wanted = {head: (1 - alpha) * winners.count(head) + alpha * left for head in range(len(scores))}
    counts = {head: math.floor(share) for head, share in wanted.items()}
    while sum(counts.values()) < len(scores) * left:  # whoever was cut most gets one
        counts[max(wanted, key=lambda head: (wanted[head] - counts[head], -head))] += 1
    return [best(scores[head], counts[head]) for head in counts]

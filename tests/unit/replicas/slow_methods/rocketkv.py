"""SnapKV keeps T / cr^alpha."""

from __future__ import annotations

import math
from typing import Any

from tests.unit.replicas.slow_methods import LayerView
from tests.unit.replicas.slow_methods.snapkv import ends, scores

__all__ = ["KEPT", "SERVED", "ends", "layer_budgets", "scores"]

KEPT = ["rocketkv@8:window=4,kernel=5", "rocketkv@0.1:window=2,kernel=3"]
SERVED = []


def layer_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    tokens = layers[0].tokens
    ratio = tokens / budget
    alpha = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    return [math.floor(round(tokens / ratio**alpha, 6))] * len(layers)

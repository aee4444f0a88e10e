"""What all queries attended to, and the most recent."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tests.unit.replicas.slow_methods import LayerView, received

KEPT = ["h2o@12", "h2o@0.3", "h2o@12:heavy=0.25"]
SERVED = ["h2o@20", "h2o@0.4+append", "h2o@16:heavy=0.75"]


def ends(spec: Any, budget: int) -> tuple[int, int]:
    return 0, budget - math.floor(budget * spec.heavy)


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    return received(layer, head, layer.tokens)

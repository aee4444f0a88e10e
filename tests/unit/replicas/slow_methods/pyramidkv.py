"""SnapKV under budgets that fall with the height of a layer."""

from __future__ import annotations

import math
from typing import Any

from tests.unit.replicas.slow_methods import LayerView
from tests.unit.replicas.slow_methods.snapkv import ends, scores

__all__ = ["KEPT", "SERVED", "ends", "layer_budgets", "scores"]

KEPT = ["pyramidkv@14:window=4,beta=3", "pyramidkv@0.5:window=4", "pyramidkv@0.8:window=4"]
SERVED = ["pyramidkv@16:window=4", "pyramidkv@16+ring:window=4,sinks=1"]


def layer_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    return falling(spec, len(layers), layers[0].tokens, budget)


def falling(spec: Any, layers: int, tokens: int, budget: int) -> list[int]:
    window = spec.window
    if budget <= window or layers == 1 or tokens < 2 * (budget - window):  # short prompts: flat
        return [budget] * layers
    lowest = (budget - window) // spec.beta
    highest = 2 * (budget - window) - lowest
    if highest >= tokens - window:
        highest = tokens - window
        lowest = 2 * (budget - window) - highest
    step = (highest - lowest) // (layers - 1)
    rest = (highest - lowest) - step * (layers - 1)  # the paper leaves it on every layer, which breaks the total
    return [highest - math.ceil(rest / 2) - layer * step + window for layer in range(layers)]

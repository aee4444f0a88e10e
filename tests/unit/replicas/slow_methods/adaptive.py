"""SnapKV under the smallest budget that keeps enough of its attention."""

from __future__ import annotations

import math
from typing import Any

from tests.unit.replicas.slow_methods import LayerView, received
from tests.unit.replicas.slow_methods.snapkv import ends, scores

__all__ = ["KEPT", "SERVED", "ends", "layer_budgets", "scores", "selects"]

KEPT = [
    "adaptive@0.6:window=4,target=0.7",
    "adaptive:window=4,target=0.6",
    "adaptive@40:window=4,target=0.6",
    "adaptive@0.9:window=3,target=0.5,least=0.1",
]
SERVED = ["adaptive@0.8:window=4,target=0.6"]


def selects(spec: Any, tokens: int, budget: int) -> bool:
    return budget < tokens or tokens > spec.window


def layer_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    return [smallest(spec, layers, budget)] * len(layers)


def smallest(spec: Any, layers: list[LayerView], budget: int) -> int:
    """Return the smallest budget whose kept window attention reaches the target, within its bounds."""
    tokens = layers[0].tokens
    window = min(spec.window, budget)
    sinks = spec.sinks if spec.decode == "ring" else 0
    least = min(max(window + 1, sinks + 1, math.ceil(round(spec.least * tokens, 6))), budget)
    votes, inside = [], []  # for each layer and KV head
    for layer in layers:
        for head in range(layer.kv_heads):
            mass = received(layer, head, window)
            votes.append(sorted(mass[: tokens - window], reverse=True))
            inside.append(sum(mass[tokens - window :]))
    for count in range(tokens - window + 1):
        covered = sum((sum(v[:count]) + i) / (layers[0].group * window) for v, i in zip(votes, inside, strict=True))
        if covered / len(votes) >= spec.target:
            break
    return min(max(count + window, least), budget)

"""What the last query attends to, on average over all heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.unit.replicas import slow_methods
from tests.unit.replicas.slow_methods import LayerView, received

KEPT = ["tova@10", "tova@10:per_head=true"]
SERVED = ["tova@16", "tova@16+append", "tova@16+ring", "tova@16:per_head=true"]


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    return received(layer, head, 1) if spec.per_head else last_query_average(layer)


def last_query_average(layer: LayerView) -> list[float]:
    """What each position gets from the last query, averaged over all query heads of the layer."""
    rows = [slow_methods.attention_row(layer, member, layer.tokens - 1) for member in range(len(layer.queries))]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

"""The last queries vote, and votes are pooled."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.unit.replicas.slow_methods import LayerView, pooled, received

KEPT = ["snapkv@12:window=5", "snapkv@0.5:window=4,kernel=3,pooling=max", "snapkv@40"]
SERVED = ["snapkv@20:window=6", "snapkv@16+ring:window=4", "snapkv@16+argmin:window=4"]


def ends(spec: Any, budget: int) -> tuple[int, int]:
    return 0, spec.window


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    return pooled(received(layer, head, window)[: layer.tokens - window], spec.kernel, spec.pooling)

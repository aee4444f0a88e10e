"""Keys of small norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.unit.replicas.slow_methods import LayerView

KEPT = ["knorm@10"]
SERVED = ["knorm@16"]


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    return [-float(key.double().norm()) for key in layer.keys[head]]

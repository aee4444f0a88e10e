"""Keys unlike the mean direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.unit.replicas.slow_methods import LayerView

KEPT = ["keydiff@0.3"]
SERVED = ["keydiff@0.3+argmin"]


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    directions = [key.double() / key.double().norm() for key in layer.keys[head]]
    anchor = sum(directions, torch.zeros(len(directions[0])).double()) / len(directions)
    return [-float(direction @ anchor / anchor.norm()) for direction in directions]

"""The last queries vote for chunks of neighbours, all heads of a layer together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.unit.replicas.slow_methods import LayerView, received
from tests.unit.replicas.slow_methods.snapkv import ends

__all__ = ["KEPT", "SERVED", "ends", "scores"]

KEPT = ["chunkkv@14:window=4,chunk=3", "chunkkv@0.5:window=3", "chunkkv@20+protect:window=4,chunk=4"]
SERVED = ["chunkkv@16:window=4,chunk=5", "chunkkv@20+ring:window=4,chunk=3"]


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    """Return the mean of what a chunk's tokens get from all heads; `head` makes no difference."""
    tokens = layer.tokens - window
    heads = [received(layer, each, window) for each in range(layer.kv_heads)]
    result = []
    for position in range(tokens):
        first = position // spec.chunk * spec.chunk
        chunk = range(first, min(first + spec.chunk, tokens))
        result.append(sum(own[other] for own in heads for other in chunk) / len(chunk))
    return result

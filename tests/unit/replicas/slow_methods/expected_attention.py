"""What queries to come will attend to."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.unit.replicas.slow_methods import LayerView

KEPT = ["expected_attention@12:window=16,horizon=32", "expected_attention@0.4:sinks=2"]
SERVED = ["expected_attention@18:window=12"]


def ends(spec: Any, budget: int) -> tuple[int, int]:
    return spec.sinks, 0


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    """Return attention that normally distributed queries of the next `horizon` positions would give, times |value|."""
    tokens, head_dim = layer.keys.shape[1:]
    scale = 1 / math.sqrt(head_dim)
    observed = min(spec.window, tokens - spec.sinks)
    future = torch.zeros(head_dim, head_dim).double()
    for position in range(tokens, tokens + spec.horizon):
        future += rotation(position, inv_freq) / spec.horizon
    scores = [0.0] * tokens
    for member in layer.members(head):
        queries = [  # rotated back to position 0
            rotation(-position, inv_freq) @ layer.queries[member, position].double()
            for position in range(tokens - observed, tokens)
        ]
        mean = torch.stack(queries).mean(0)
        covariance = torch.zeros(head_dim, head_dim).double()
        for query in queries:
            covariance += torch.outer(query - mean, query - mean) / observed
        mean, covariance = future @ mean, future @ covariance @ future.T
        logits = [scale * mean @ key + scale**2 / 2 * key @ covariance @ key for key in layer.keys[head].double()]
        for position, weight in enumerate(torch.stack(logits[spec.sinks :]).softmax(0).tolist()):
            scores[spec.sinks + position] += weight
    return [score * float(value.double().norm()) for score, value in zip(scores, layer.values[head], strict=True)]


def rotation(position: int, inv_freq: Tensor) -> Tensor:
    """Return the matrix [d, d] that rotates a vector to a position: coordinate i turns with coordinate i + d/2."""
    half = len(inv_freq)
    matrix = torch.zeros(2 * half, 2 * half).double()
    for i in range(half):
        angle = position * float(inv_freq[i])
        matrix[i, i] = matrix[half + i, half + i] = math.cos(angle)
        matrix[i, half + i] = -math.sin(angle)
        matrix[half + i, i] = math.sin(angle)
    return matrix

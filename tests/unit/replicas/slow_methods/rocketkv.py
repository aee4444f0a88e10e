"""SnapKV keeps T / cr^alpha, of which every step reads the entries that promise most."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, stack

from tests.unit.replicas.slow_methods import LayerView
from tests.unit.replicas.slow_methods.snapkv import ends, scores

__all__ = ["KEPT", "SERVED", "attend", "ends", "layer_budgets", "scores", "segments"]

KEPT = ["rocketkv@8:window=4,kernel=5", "rocketkv@0.1:window=2,kernel=3"]
SERVED = ["rocketkv@10:window=4,kernel=5", "rocketkv@30:window=4"]


def layer_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    return [kept(layers[0].tokens, budget)] * len(layers)


def kept(tokens: int, budget: int) -> int:
    ratio = tokens / budget
    alpha = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    return math.floor(round(tokens / ratio**alpha, 6))


def segments(tokens: int, budget: int, head_dim: int) -> tuple[int, int, int]:
    """Return the entries of a segment, those that a step reads, and the channels by which it chooses."""
    left = kept(tokens, budget)
    segment = next(size for size in range(1, left + 1) if size * size * budget >= left)
    if segment * budget > left:
        segment = 1
    return segment, budget // 2, max(1, head_dim * segment * budget // left)


def attend(
    queries: Tensor, keys: list[Tensor], values: list[Tensor], segment: int, reads: int, channels: int
) -> Tensor:
    """Return queries [group, d] on the `reads` entries of one KV head that promise most, by estimates from some
    channels.
    """
    head_dim = queries.shape[1]
    weights = [float(queries[:, c].abs().sum()) for c in range(head_dim)]
    largest = sorted(range(head_dim), key=lambda c: -weights[c])[:channels]
    promise = [0.0] * len(keys)
    for query in queries:
        estimates = []
        for entry in range(len(keys)):
            first = entry // segment * segment
            neighbours = keys[first : first + segment]
            estimate = 0.0
            for c in largest:
                column = [float(key[c]) for key in neighbours]
                estimate += float(query[c]) * (max(column) if float(queries[:, c].sum()) > 0 else min(column))
            seen = sum(abs(float(query[c])) for c in largest) / float(query.abs().sum())
            estimates.append(estimate / math.sqrt(head_dim * seen))
        total = sum(math.exp(estimate) for estimate in estimates)
        for entry, estimate in enumerate(estimates):
            promise[entry] += math.exp(estimate) / total
    read = sorted(sorted(range(len(keys)), key=lambda entry: (-promise[entry], entry))[:reads])
    logits = queries @ stack([keys[entry] for entry in read]).T / math.sqrt(head_dim)
    return logits.softmax(-1) @ stack([values[entry] for entry in read])

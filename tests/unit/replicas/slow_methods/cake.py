"""Mean and variance of the last queries, under budgets by entropy and variance."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tests.unit.replicas import slow_methods
from tests.unit.replicas.slow_methods import LayerView, mean_and_variance, pooled

KEPT = ["cake@14:window=4", "cake@0.4:window=3,gamma=5", "cake@14:window=4,tau1=0.5,tau2=2"]
SERVED = ["cake@14:window=4"]


def ends(spec: Any, budget: int) -> tuple[int, int]:
    return 0, spec.window


def scores(spec: Any, layer: LayerView, head: int, window: int, inv_freq: Tensor) -> list[float]:
    scores = [0.0] * layer.tokens
    for member in layer.members(head):
        means, variances = mean_and_variance(layer, member, window)
        for position in range(layer.tokens):
            scores[position] += means[position] + spec.gamma * variances[position]
    return pooled(scores[: layer.tokens - window], spec.kernel, spec.pooling)


def layer_budgets(spec: Any, layers: list[LayerView], budget: int) -> list[int]:
    window = min(spec.window, budget)
    prefix = layers[0].tokens - window
    preferences = []
    for layer in layers:
        entropy = spread = 0.0
        for member in range(len(layer.queries)):
            for query in range(layer.tokens - window, layer.tokens):
                entropy -= sum(
                    part * math.log(part)
                    for part in slow_methods.attention_row(layer, member, query)[:prefix]
                    if part > 0
                )
            spread += sum(mean_and_variance(layer, member, window)[1][:prefix])
        preferences.append(entropy ** (1 / spec.tau1) * spread ** (1 / spec.tau2))
    shares = share_out(len(layers) * (budget - window), preferences, prefix)
    return [share + window for share in shares]


def share_out(total: int, preferences: list[float], most: int) -> list[int]:
    """Return `total` in proportion to the preferences, none above `most`, rounded by largest remainders."""
    shares: dict[int, float] = {}
    open_ = list(range(len(preferences)))
    while True:
        left = total - sum(shares.values())
        weight = sum(preferences[i] for i in open_)
        wanted = {i: left * preferences[i] / weight if weight > 0 else left / len(open_) for i in open_}
        capped = [i for i in open_ if wanted[i] > most]
        if not capped:
            shares.update(wanted)
            break
        shares.update(dict.fromkeys(capped, most))
        open_ = [i for i in open_ if i not in capped]
        if not open_:
            break
    rounded = [math.floor(shares[i]) for i in range(len(preferences))]
    by_remainder = sorted(range(len(preferences)), key=lambda i: -(shares[i] - rounded[i]))
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded

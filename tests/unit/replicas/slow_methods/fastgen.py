"""The first set that recovers enough attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from tests.unit.replicas.slow_methods import LayerView, best, received

KEPT = ["fastgen", "fastgen:recovery=0.7", "fastgen:recovery=0.3"]
SERVED = ["fastgen:recovery=0.6"]


def kept_by_head(
    spec: Any, layer: LayerView, head: int, special: AbstractSet[int], punctuation: AbstractSet[int]
) -> list[int]:
    """Return the first set of positions that recovers enough of the attention of the whole prompt."""
    tokens = layer.tokens
    scores = received(layer, head, tokens)
    part = math.ceil(round(0.3 * tokens, 6))
    heavy = best(dict(enumerate(scores)), part)
    recent = range(tokens - part, tokens)
    chosen: set[int] = set()
    additions: list[Iterable[int]] = [special, punctuation, heavy, recent, range(tokens)]
    for addition in additions:
        chosen |= set(addition)
        if sum(scores[position] for position in chosen) / (layer.group * tokens) >= spec.recovery:
            break
    return sorted(chosen | {tokens - 1})

"""The Pareto front: what nothing else beats on every axis at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def front(rows: Sequence[Sequence[float | None]], senses: Sequence[int]) -> list[bool]:
    """Return True for each row on the front; `senses` has 1 for an axis on which more is better and -1 where less is.

    A row is off it if another is at least as good on every axis and better on one, or if one of its own values is
    unknown. Equal rows are on it together.
    """
    known = [at for at, row in enumerate(rows) if None not in row]
    losses = -np.array([rows[at] for at in known], dtype=float).reshape(len(known), len(senses)) * np.array(senses)
    on = [False] * len(rows)
    for at, loss in zip(known, losses, strict=True):
        beaten = (losses <= loss).all(axis=1) & (losses < loss).any(axis=1)
        on[at] = not beaten.any()
    return on

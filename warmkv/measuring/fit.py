"""Step costs from measured steps: seconds = a + b * tokens + c * context + d * tokens * context.

What counts is the relative error, so that short steps matter as much as long ones; steps that another process
disturbed weigh less; no coefficient is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from warmkv.simulator.steps.costs import StepCost
from warmkv.simulator.steps.step_profile import ErrorOfFit, FittedCost

Floats = NDArray[np.float64]
POINTS_PER_COEFFICIENT = 2
HUBER, ROUNDS = 1.345, 20
"""Residuals beyond HUBER times their usual size weigh less (Huber, 1964); so often the weights are found anew."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step."""

    tokens: float
    context: float
    seconds: float


def fit(points: Sequence[MeasuredStep], *, pairs: bool = False) -> FittedCost:
    """Fit a, b and c, with `pairs` d as well, and say how far off the fit is.

    The error out of sample is that of each point when all others are fitted. Raises ValueError if the points cannot
    tell the coefficients, or if a step took no time.
    """
    seconds, tokens, context = (
        np.array([getattr(point, name) for point in points], dtype=float) for name in ("seconds", "tokens", "context")
    )
    columns = _columns(tokens, context, pairs)
    if not (seconds > 0).all():
        raise ValueError("a measured step took no time; the clock is too coarse for this model")
    _check(columns)
    design = np.column_stack(columns) / seconds[:, None]  # every row then aims at 1
    solution = _robust(design)
    held_out = [abs(1 - design[at] @ _robust(np.delete(design, at, axis=0))) for at in range(len(points))]
    cost = StepCost(*(float(value) for value in solution))
    return FittedCost(
        a=cost.a,
        b=cost.b,
        c=cost.c,
        d=cost.d,
        points=len(points),
        in_sample=_error(np.abs(1 - design @ solution)),
        out_of_sample=_error(np.array(held_out)),
    )


def check_grid(places: Sequence[tuple[float, float]], *, pairs: bool = False) -> None:
    """Raise ValueError if steps of so many tokens and such contexts cannot tell the coefficients."""
    tokens, context = np.array(places, dtype=float).reshape(-1, 2).T
    _check(_columns(tokens, context, pairs))


def _columns(tokens: Floats, context: Floats, pairs: bool) -> list[Floats]:
    return [np.ones(len(tokens)), tokens, context, *([tokens * context] if pairs else [])]


def _check(columns: Sequence[Floats]) -> None:
    count = len(columns[0])
    for name, column in zip(("tokens", "context"), columns[1:3], strict=True):
        if len(np.unique(column)) < 2:
            raise ValueError(f"all {count} measured steps have the same {name}")
    scaled = np.column_stack([column / column.max() for column in columns])
    least = POINTS_PER_COEFFICIENT * int(np.linalg.matrix_rank(scaled))
    if count < least:
        raise ValueError(f"{count} measured steps are too few to fit; take at least {least}")


def _error(relative: Floats) -> ErrorOfFit:
    return ErrorOfFit(mean=float(relative.mean()), p95=float(np.percentile(relative, 95)))


def _robust(design: Floats) -> Floats:
    """Solve x >= 0 with design @ x near 1, outliers weighing less the farther they are."""
    weights = np.ones(len(design))
    solution = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        before, solution = solution, _non_negative(design * weights[:, None], weights)
        residuals = np.abs(1 - design @ solution)
        usual = 1.4826 * np.median(residuals)  # the standard deviation, if they are normal
        if usual < 1e-9 or np.allclose(before, solution, rtol=1e-9, atol=0.0):
            break
        weights = np.sqrt(np.minimum(1.0, HUBER * usual / np.maximum(residuals, 1e-12)))
    return solution


def _non_negative(design: Floats, target: Floats) -> Floats:
    """Solve least squares with x >= 0 exactly: the best choice of columns whose own solution is not negative."""
    columns = design.shape[1]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(columns), float(target @ target)
    for size in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), size)):
            fitted = np.linalg.lstsq(design[:, chosen] / scale[chosen], target, rcond=None)[0] / scale[chosen]
            rest = float(((target - design[:, chosen] @ fitted) ** 2).sum())
            if (fitted >= 0).all() and rest < least * (1 - 1e-9):
                best, least = np.zeros(columns), rest
                best[chosen] = fitted
    return best

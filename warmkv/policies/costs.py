"""What a step takes: seconds = a + b * tokens computed + c * context tokens read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StepCost:
    """A linear step-time model: `a` seconds a step, `b` a computed token, `c` a context token attended to."""

    a: float
    b: float
    c: float

    def seconds(self, tokens: float, context: float) -> float:
        return self.a + self.b * tokens + self.c * context


def fit_step_cost(tokens: Sequence[float], context: Sequence[float], seconds: Sequence[float]) -> StepCost:
    """Least squares with coefficients kept non-negative: a negative one is fixed at 0 and the rest fitted again.

    Raises ValueError if there is nothing to fit.
    """
    if not len(seconds):
        raise ValueError("no measured step to fit a step-time model to")
    design = np.column_stack([np.ones(len(seconds)), tokens, context]).astype(float)
    target = np.asarray(seconds, dtype=float)
    free = [0, 1, 2]
    solution = np.zeros(3)
    while free:
        fitted, *_ = np.linalg.lstsq(design[:, free], target, rcond=None)
        if (fitted >= 0).all():
            solution[free] = fitted
            break
        free.pop(int(np.argmin(fitted * np.abs(design[:, free]).mean(axis=0))))
    return StepCost(*(float(value) for value in solution))

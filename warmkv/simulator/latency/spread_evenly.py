"""Amounts that are spread evenly over time: how much of them falls into which stretch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def during(a: Floats, b: Floats, start: Floats, end: Floats, amount: Floats) -> Floats:
    """Sum what falls between each a and b of all the amounts, each spread evenly from its start to its end."""
    used = (end > start) & (amount > 0)
    rate = amount[used] / (end - start)[used]
    times, rates = np.concatenate([start[used], end[used]]), np.concatenate([rate, -rate])
    order = np.argsort(times)
    times, rates = times[order], np.cumsum(rates[order])
    total = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(times))])
    if not len(times):
        return np.zeros(len(a))
    spread: Floats = np.interp(b, times, total) - np.interp(a, times, total)
    return spread

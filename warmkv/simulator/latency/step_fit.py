"""The search behind a calibration: step times with which a simulated server is as fast as a measured one.

A time that was measured is a sum over steps: steps * a + tokens * b + context * c. How many steps, tokens and context
tokens went by between two tokens of a request follows from the schedule, so the coefficients are a linear fit if the
schedule is known. It is known about from the measured times, and exactly once the coefficients are right. So:

1. fit with the work that the measured times themselves tell, spread evenly over each request's time;
2. simulate with the result, fit with the work counted there, and again;
3. move the best of these by small steps as long as their figures come closer to the measured ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from warmkv.simulator.engine.limits import Limits
from warmkv.simulator.latency.measured_requests import Measured
from warmkv.simulator.latency.server import ServedRequest
from warmkv.simulator.latency.spread_evenly import Floats, during
from warmkv.simulator.steps.costs import StepCost

Serve = Callable[[StepCost], list[ServedRequest]]  # the requests as a server with these step times answers them
Loss = Callable[[list[ServedRequest]], float]  # how far from the measured times

ROUNDS = 15  # of simulating and fitting
FACTOR = 2.0  # by which a coefficient may change in a round
SETTLED = 1e-3  # relative change in a round below which nothing is gained
LEAST_SHARE = 0.02  # of a step's time that each coefficient starts with: from 0 none would come back
STEPS = (0.03, 2e-4)  # of a coefficient, relative: the first and the last by which the best is moved
MOST_MOVES = 300
POLISHED = 3  # of the rounds' results: the loss has many small dents
TOLERATED = 3.0  # median errors; rows beyond count less (Huber)


def fit(requests: Measured, limits: Limits, which: slice, serve: Serve, loss: Loss) -> StepCost:
    """Fit coefficients to the measured times of some requests; all are served."""
    design, seconds = _as_measured(requests, limits, which)
    here = least_squares(design, seconds, design[:, 0])
    here = np.maximum(here, LEAST_SHARE * (design @ here).mean() / np.maximum(design.mean(axis=0), 1e-300))
    served = serve(StepCost(*here))
    found = [(loss(served), here.tolist())]
    for _ in range(ROUNDS):
        design, seconds = _as_simulated(served, requests, which)
        there = np.clip(least_squares(design, seconds, design[:, 0]), here / FACTOR, here * FACTOR)
        there = np.sqrt(here * there)  # half way: the schedule follows the coefficients, and overshoots
        served = serve(StepCost(*there))
        found.append((loss(served), there.tolist()))
        settled = np.allclose(here, there, rtol=SETTLED, atol=0)
        here = there
        if settled:
            break
    polished = [
        _polish(np.array(start), reached, _directions(design, np.array(start)), lambda cost: loss(serve(cost)))
        for reached, start in sorted(found)[:POLISHED]
    ]
    return StepCost(*min(polished)[1])


def _as_measured(requests: Measured, limits: Limits, which: slice) -> tuple[Floats, Floats]:
    """Work and seconds between the first and the last token of requests: [rows, 3] and [rows].

    Decoding is spread evenly over a request's time, its prompt over as many steps as it needs before its first token.
    """
    first, last = requests.first, requests.last
    steps = (requests.output - 1).astype(np.float64)
    new = (requests.prompt - requests.cached).astype(np.float64)
    some = steps > 0
    gap = float(np.median((last - first)[some] / steps[some]))
    chunks = (-(-(requests.prompt - requests.cached) // limits.max_batched_tokens)).astype(np.float64)
    start = np.maximum(requests.arrival, first - gap * chunks)
    tokens: Floats = np.zeros(len(requests))
    context: Floats = np.zeros(len(requests))
    spans: tuple[tuple[Floats, Floats, Floats, Floats], ...] = (
        (first, last, steps, steps * (requests.prompt + requests.output / 2)),
        (start, first, new, chunks * (requests.prompt + requests.cached) / 2 + new / 2),
    )
    for begin, end, computed, read in spans:
        tokens += during(first, last, begin, end, computed)
        context += during(first, last, begin, end, read)
    rows = _rows(which, some)
    return np.column_stack([steps, tokens, context])[rows], (last - first)[rows]


def _as_simulated(served: list[ServedRequest], requests: Measured, which: slice) -> tuple[Floats, Floats]:
    """Fit likewise with the work of a simulation, and rows for the time up to the first token, too.

    A request waits for the step in progress when it arrives; that wait is the simulation's.
    """
    work = np.array([(s.work_before, s.work_first, s.work_finished) for s in served], dtype=float)
    noted = np.array([s.noted for s in served])
    design = np.concatenate([(work[:, 1] - work[:, 0])[which], (work[:, 2] - work[:, 1])[which]])
    seconds = np.concatenate([(requests.first - noted)[which], (requests.last - requests.first)[which]])
    some = design[:, 0] > 0
    return design[some], seconds[some]


def _rows(which: slice, some: NDArray[np.bool_]) -> NDArray[np.bool_]:
    chosen = np.zeros(len(some), dtype=bool)
    chosen[which] = True
    return chosen & some


def least_squares(design: Floats, seconds: Floats, steps: Floats) -> Floats:
    """Return coefficients of the columns, none negative, from spans of that many steps.

    Errors count relative to the time, with a step of grace; wild ones less.
    """
    expected = np.maximum(seconds, 1e-12)
    trust = np.ones(len(seconds))
    for _ in range(6):
        weight = trust / (expected * (1 + 1 / steps))
        solution = _nonnegative(design * weight[:, None], seconds * weight)
        expected = np.maximum(design @ solution, 1e-12)
        error = np.abs(seconds / expected - 1)
        trust = np.minimum(1, np.sqrt(TOLERATED * np.median(error) / np.maximum(error, 1e-12)))
        trust = np.maximum(trust, 1e-6)
    return solution


def _nonnegative(design: Floats, target: Floats) -> Floats:
    """Solve non-negative least squares: the best solution in which no coefficient is negative.

    Of those as good as each other it is the one with the fewest and first columns: steps before their tokens.
    """
    best, lowest = np.zeros(design.shape[1]), float(target @ target)
    better = 1e-12 * lowest
    for count in range(1, design.shape[1] + 1):
        for free in itertools.combinations(range(design.shape[1]), count):
            fitted, *_ = np.linalg.lstsq(design[:, free], target, rcond=None)
            left = target - design[:, free] @ fitted
            if (fitted >= 0).all() and (loss := float(left @ left)) < lowest - better:
                best, lowest = np.zeros(design.shape[1]), loss
                best[list(free)] = fitted
    return best


def _directions(design: Floats, coefficients: Floats) -> Floats:
    """Return directions among the logarithms of the coefficients that change the times alike, one a row.

    Coefficients trade off against each other, so along the axes the search would creep.
    """
    shares = design * coefficients / (design @ coefficients)[:, None]
    spread, axes = np.linalg.eigh(shares.T @ shares / len(shares))
    directions: Floats = (axes / np.sqrt(np.maximum(spread, 1e-3))).T
    return directions


def _polish(
    best: Floats, lowest: float, directions: Floats, loss: Callable[[StepCost], float]
) -> tuple[float, list[float]]:
    """Polish by compass search, which needs no slopes: a schedule that jumps has none."""
    size, moves = STEPS[0], 0
    while size > STEPS[1] and moves < MOST_MOVES:
        found = False
        for direction in (*directions, *-directions):
            there = best * np.exp(size * direction)
            moves += 1
            if (reached := loss(StepCost(*there.tolist()))) < lowest:
                best, lowest, found = there, reached, True
        if not found:
            size /= 2
    return lowest, best.tolist()

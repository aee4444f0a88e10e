"""Fitting the step times of a continuously batching server to measured request times.

The times of single steps are not known, only when requests arrived and when their tokens came. So the server is
simulated with candidate coefficients (`server.py`) until the simulated requests take as long as the measured ones
(`step_fit.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warmkv.faults import UserError
from warmkv.simulator.engine.limits import BatchingError, Limits
from warmkv.simulator.latency.measured_requests import Measured
from warmkv.simulator.latency.server import ServedRequest, Server
from warmkv.simulator.latency.step_fit import fit
from warmkv.simulator.steps.costs import StepCost

Floats = NDArray[np.float64]

METRICS = ("ttft", "tpot", "e2e")
FIGURES = {"mean": None, "p50": 50.0, "p90": 90.0, "p99": 99.0}
PERCENTS = [percent for percent in FIGURES.values() if percent is not None]
QUANTILES = np.arange(2.5, 100, 5)  # per cent, at which distributions are compared beside the figures
WILD = 0.1  # error of a request, as a share of the mean, beyond which it does not matter how large it is
LEAST_REQUESTS = 10

Report = Mapping[str, Mapping[str, float]]  # metric -> figure -> value
Progress = Callable[[int], None]  # told how many simulations were run


class CalibrationError(UserError):
    """Measurements that no step model can be fitted to; the message says why."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of n requests. TPOT counts the gaps between tokens; it is NaN for a request of one token."""

    ttft: Floats
    tpot: Floats
    e2e: Floats

    def part(self, which: slice) -> Times:
        return Times(self.ttft[which], self.tpot[which], self.e2e[which])


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a fit does on requests: measured and simulated figures in seconds, and the error as a share of the former."""

    measured: Report
    simulated: Report
    error: Report

    @property
    def worst(self) -> float:
        return max(abs(error) for figures in self.error.values() for error in figures.values())


@dataclass(frozen=True, slots=True)
class Calibration:
    cost: StepCost  # fitted to all requests
    half_cost: StepCost  # fitted to the first half of them
    in_sample: Judgement  # of `cost`, on all
    out_of_sample: Judgement  # of `half_cost`, on the second half
    simulated: Times  # with `cost`
    half_simulated: Times  # with `half_cost`, all requests
    preemptions: int  # in the simulation with `cost`


def calibrate(requests: Measured, limits: Limits, progress: Progress = lambda simulations: None) -> Calibration:
    """Fit to all requests, and to the first half to judge on the second. Raises CalibrationError.

    Every simulation serves all requests, as the server did; a fit to one half compares the times of that half only.
    """
    if len(requests) < LEAST_REQUESTS:
        raise CalibrationError(f"{len(requests)} requests are too few: a fit needs {LEAST_REQUESTS}")
    measured = times_of(requests.arrival, requests.first, requests.last, requests.output)
    first, second = slice(len(requests) // 2), slice(len(requests) // 2, None)
    for name, half in (("first", first), ("second", second)):
        gaps = _values(measured.part(half), "tpot")
        if not len(gaps) or not np.median(gaps) > 0:
            raise CalibrationError(
                f"nothing tells how long decoding takes: most requests of the {name} half have a single token, or all "
                "their tokens at once"
            )
    count = itertools.count(1)

    def run(cost: StepCost) -> list[ServedRequest]:
        progress(next(count))
        return serve(requests, limits, cost)[0]

    def fitted(which: slice) -> StepCost:
        distance = distance_to(measured.part(which))
        return fit(requests, limits, which, run, lambda served: distance(simulated_times(served).part(which)))

    cost, half_cost = fitted(slice(None)), fitted(first)
    served, preemptions = serve(requests, limits, cost)
    simulated, half_simulated = simulated_times(served), simulated_times(run(half_cost))
    return Calibration(
        cost,
        half_cost,
        judge(measured, simulated),
        judge(measured.part(second), half_simulated.part(second)),
        simulated,
        half_simulated,
        preemptions,
    )


def serve(requests: Measured, limits: Limits, cost: StepCost) -> tuple[list[ServedRequest], int]:
    """Serve the requests in virtual time; return them with their times, and the preemptions. Raises CalibrationError if
    one never fits.
    """
    server = Server(cost, limits)
    columns = (requests.arrival, requests.prompt, requests.output, requests.cached)
    served = [ServedRequest(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    try:
        server.serve(served)
    except BatchingError as error:
        raise CalibrationError(str(error)) from None
    return served, sum(request.num_preemptions for request in served)


def simulated_times(served: list[ServedRequest]) -> Times:
    table = np.array([(s.arrival, s.first, s.finished, s.output) for s in served]).T
    return times_of(table[0], table[1], table[2], table[3].astype(np.int64))


def times_of(arrival: Floats, first: Floats, last: Floats, output: NDArray[np.int64]) -> Times:
    tpot = np.where(output > 1, (last - first) / np.maximum(output - 1, 1), np.nan)
    return Times(first - arrival, tpot, last - arrival)


def figures(times: Times) -> Report:
    """Return mean and percentiles of every metric that has values: answers of one token have no TPOT."""
    values = {metric: _values(times, metric) for metric in METRICS}
    return {metric: dict(zip(FIGURES, _figures(found), strict=True)) for metric, found in values.items() if len(found)}


def judge(measured: Times, simulated: Times) -> Judgement:
    truth, guess = figures(measured), figures(simulated)
    error = {m: {f: guess[m][f] / truth[m][f] - 1 for f in FIGURES} for m in METRICS if m in truth and m in guess}
    return Judgement(truth, guess, error)


def _values(times: Times, metric: str) -> Floats:
    values: Floats = getattr(times, metric)
    return values[~np.isnan(values)]


def _figures(values: Floats) -> list[float]:
    return [float(values.mean()), *np.percentile(values, PERCENTS).tolist()]


def distance_to(measured: Times, compared: Sequence[str] = tuple(FIGURES)) -> Callable[[Times], float]:
    """Return a function that tells how far simulated times are from measured ones.

    It is the sum of squares over all metrics of the errors of the `compared` figures, and on average of the quantiles'
    and the requests' own. The latter two, shares of the measured mean, keep a fit to few requests from bending to
    single percentiles.
    """
    which = [list(FIGURES).index(name) for name in compared]
    goals = {metric: truth for metric in METRICS if len(truth := _values(measured, metric))}
    known = {metric: _spread(truth) for metric, truth in goals.items()}

    def distance(simulated: Times) -> float:
        total = 0.0
        for metric, truth in goals.items():
            guess = _values(simulated, metric)
            (exact, quantiles), (figures, spread) = known[metric], _spread(guess)
            wrong, moved = (figures / exact - 1)[which], (spread - quantiles) / exact[0]
            each = np.minimum(np.abs(guess - truth) / exact[0], WILD)
            total += float(wrong @ wrong + np.mean(moved**2) + np.mean(each**2))
        return total

    return distance


def _spread(values: Floats) -> tuple[Floats, Floats]:
    """Return the figures of some values, and their quantiles."""
    found = np.percentile(values, [*PERCENTS, *QUANTILES])
    return np.array([values.mean(), *found[: len(PERCENTS)]]), found[len(PERCENTS) :]

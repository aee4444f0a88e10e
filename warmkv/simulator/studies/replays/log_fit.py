"""Step times from an access log: what its own requests took, in prefill, while decoding, and outside their replica.

1. Every measured span is a sum over engine steps: a request's own steps, and the tokens and contexts of whatever else
   its replica computed meanwhile, spread evenly over the time that the others took. That gives a linear fit.
2. The log is simulated, each request on the replica that it was on, and prefill, decoding and the time outside are
   scaled as long as the simulated times come closer to the measured ones: a span has more of some steps and less of
   others than an even spread tells, and the fit follows usual requests where latencies also have a tail. Compared are
   requests that find as much of their prompt warm as the log says: what was written before the log begins is cold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from warmkv.config import Config
from warmkv.faults import UserError
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import columns_of
from warmkv.prefixes.record_columns import RecordColumns
from warmkv.simulator.cluster.jobs import Ints, Jobs
from warmkv.simulator.latency.calibration import Times, distance_to, times_of
from warmkv.simulator.latency.spread_evenly import during
from warmkv.simulator.latency.step_fit import least_squares
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.workload.replay_inputs import ReplayInputs

Floats = NDArray[np.float64]
SpecOf = Callable[[RequestRecord], PolicySpec]
ENOUGH = 20  # measured requests below which a fit says little
MOST_SIMULATED = 500  # requests, the first ones, that the scales are fitted to
STEPS = (0.2, 0.01)  # of a scale, relative: the first and the last by which it is moved
MOST_MOVES = 80
COMPARED = ("mean", "p50", "p90")
"""Figures that are fitted. What is beyond is mostly made by what no step tells of: other work of a machine."""

NOTHING = "no record of the log carries timings of a replica to fit step times to"


class LogFitError(UserError):
    """A log that tells nothing of step times."""


def measured(records: RecordColumns) -> NDArray[np.bool_]:
    """Return which records carry timings of a replica: those of an API behind a proxy say nothing of any."""
    timed = (records.e2e >= records.ttft) & (records.ttft > records.queue) & (records.queue >= 0)
    return timed & ~records.is_named("replica", "")


def measured_times(records: RecordColumns) -> Times:
    """Return the latencies of clients, by the log."""
    return times_of(np.zeros(len(records)), records.ttft, records.e2e, records.output_tokens.astype(np.int64))


def simulated_times(jobs: Jobs, served: Ints) -> Times:
    """Return the latencies of served jobs in a simulation."""
    arrival, first, last = (jobs.column(name)[served] for name in ("arrival", "first", "finished"))
    return times_of(arrival, first, last, jobs.records.output_tokens[served].astype(np.int64))


def fit(records: Sequence[RequestRecord], config: Config, spec_of: SpecOf) -> UniformCosts:
    """Step times with which a replay takes as long as the log says. Raises LogFitError if no record carries timings."""
    columns = columns_of(records)
    timed = columns.take(measured(columns))
    if not len(timed):
        raise LogFitError(NOTHING)
    until = float(timed.arrival[MOST_SIMULATED]) if len(timed) > MOST_SIMULATED else math.inf
    return _scaled(timed[:MOST_SIMULATED], until, config, linear_fit(timed, config, spec_of))


def linear_fit(records: Sequence[RequestRecord], config: Config, spec_of: SpecOf) -> UniformCosts:
    """Step 1; all records carry timings."""
    columns = columns_of(records)
    by_replica = [columns.take(columns.replica == at) for at in dict.fromkeys(columns.replica.tolist())]
    chunk = config.engine.tokens_per_step(on_gpu=config.simulator.model.is_whole)
    parts = [_rows(group, chunk, spec_of) for group in by_replica]
    work, seconds = (np.concatenate(each) for each in zip(*parts, strict=True))
    found = [float(value) for value in least_squares(work, seconds, work[:, 0] + work[:, 3])]
    return UniformCosts(PhaseCosts(StepCost(*found[:3]), StepCost(*found[3:])), float(np.median(_outside(columns))))


def _outside(records: RecordColumns) -> Floats:
    """Return seconds up to the first token that requests did not spend in their replica; 0 in logs that do not tell."""
    outside = np.maximum(0.0, records.ttft - records.queue - records.prefill)
    return np.where(records.prefill != 0, outside, 0.0)


def _rows(records: RecordColumns, chunk: int, spec_of: SpecOf) -> tuple[Floats, Floats]:
    """Work [2 * requests, 6] and seconds of the spans of one replica.

    Work is of prefill, then of decoding: steps, tokens computed, context read.
    """
    arrival = records.arrival - records.arrival.min()  # Unix times would cost the sums below their precision
    queue, ttft, e2e, outside = records.queue, records.ttft, records.e2e, _outside(records)
    prompt: Floats = records.input_tokens.astype(float)
    new: Floats = prompt - records.cached_tokens
    first_of = dict(zip(records.policy[::-1].tolist(), range(len(records) - 1, -1, -1), strict=True))
    specs = {policy: spec_of(records[at]) for policy, at in first_of.items()}
    sizes = zip(records.policy.tolist(), records.input_tokens.tolist(), records.output_tokens.tolist(), strict=True)
    kept, full = np.array(
        [
            (budgets.kept_tokens(specs[policy], tokens), budgets.slot_capacity(specs[policy], tokens, output))
            for policy, tokens, output in sizes
        ]
    ).T
    decodes: Floats = np.maximum(0, records.output_tokens - 1).astype(float)

    start, first, end = arrival + outside + queue, arrival + ttft, arrival + e2e
    chunks = np.array([max(1, math.ceil(count / chunk)) for count in new], dtype=float)
    prefill_read = (chunks - 1) * (prompt - new) + chunk * chunks * (chunks - 1) / 2 + prompt
    grown = np.minimum(full - kept, decodes)  # entries added; a full ring only overwrites
    read = decodes * full - grown * (grown - 1) / 2  # entries read in all decode steps

    # A prompt's chunks, in each of which a token is decoded of whoever decodes at that time.
    batch = during(start, first, first, end, end - first) / (first - start)
    entries = during(start, first, first, end, (end - first) * read / np.maximum(decodes, 1)) / (first - start)
    prefills = np.column_stack([chunks, new, prefill_read, 0 * chunks, chunks * batch, chunks * entries])

    # A request's decode steps with the other sequences in them; some are passes over chunks of prompts as well.
    chunked = [during(first, end, start, first, amount) for amount in (chunks, new, prefill_read)]
    stepped = [during(first, end, first, end, amount) for amount in (decodes, read)]
    decoded = np.column_stack([*chunked, np.maximum(decodes - chunked[0], 0.0), *stepped])
    work, seconds = np.concatenate([prefills, decoded]), np.concatenate([first - start, end - first])
    some = (seconds > 0) & (work[:, 0] + work[:, 3] > 0)
    return work[some], seconds[some]


def _scaled(records: RecordColumns, until: float, config: Config, costs: UniformCosts) -> UniformCosts:
    """Find three scales by a compass search over their logarithms (step 2).

    Requests are compared that ended `until` then, before others came that are not simulated. Where too few of them are
    as warm as they were, nothing is scaled.
    """
    inputs, logs, inside = ReplayInputs(records), np.zeros(3), replace(costs, overhead=0.0)

    @cache
    def simulated(prefill: float, decode: float) -> Jobs:
        """Simulate the replicas alone: the time outside comes on top, whatever it is."""
        scaled = _scaled_by(inside, *np.exp([prefill, decode, 0.0]))
        return run(records, config, Variant(), scaled, as_placed=True, inputs=inputs).jobs

    as_warm = simulated(0.0, 0.0).column("reused") == records.cached_tokens
    compared = np.flatnonzero(as_warm & (records.arrival + records.e2e <= until))
    if len(compared) < min(ENOUGH, len(records)):
        return costs
    distance = distance_to(measured_times(records.take(compared)), COMPARED)

    def loss(logs: Floats) -> float:
        jobs = simulated(round(float(logs[0]), 9), round(float(logs[1]), 9))  # steps there and back, up to rounding
        if len(jobs.served()) < len(jobs):
            return math.inf
        times, outside = simulated_times(jobs, compared), costs.overhead * float(np.exp(logs[2]))
        return distance(Times(times.ttft + outside, times.tpot, times.e2e + outside))

    best, size, moves = loss(logs), STEPS[0], 0
    while size > STEPS[1] and moves < MOST_MOVES:
        for move in (*np.eye(3), *-np.eye(3)):
            there, moves = logs + size * move, moves + 1
            if (reached := loss(there)) < best:
                best, logs = reached, there
                break
        else:
            size /= 2
    return _scaled_by(costs, *np.exp(logs))


def _scaled_by(costs: UniformCosts, prefill: float, decode: float, outside: float) -> UniformCosts:
    of = costs.costs
    assert isinstance(of.prefill, StepCost)
    assert isinstance(of.decode, StepCost)
    return UniformCosts(
        replace(of, prefill=of.prefill.times(float(prefill)), decode=of.decode.times(float(decode))),
        costs.overhead * float(outside),
    )

"""One round of replays: step times from the requests' own log, the settings in force, all candidates, and a search.

Pure: the actor hands a `Round` to a process of low priority, and takes each `Replayed` as it comes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warmkv.config import Config
from warmkv.faults import UserError
from warmkv.platform.whatif.candidates import BEST, NOW, WhatIfCandidate, check, combined
from warmkv.platform.whatif.warm_start import Start
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.steps.costs import StepTimes
from warmkv.simulator.studies.replays import log_fit
from warmkv.simulator.studies.replays.replay import recorded_policy
from warmkv.simulator.studies.replays.step_times import choose_cost
from warmkv.simulator.studies.replays.whatif import Prediction, Values, differences, measure, predict, ranked, warm_up
from warmkv.simulator.studies.sweeps import sweep_quality
from warmkv.simulator.workload.replay_inputs import ReplayInputs

SEARCHED = 6  # combinations of candidates that a round tries


@dataclass(frozen=True, slots=True)
class Default:
    """Say what was in force from a time on: the policy of requests that named none, and how long prefixes lived."""

    since: float  # Unix time
    policy: str
    lifetimes: Lifetimes

    @classmethod
    def of(cls, since: float, config: Config) -> Default:
        """Return what a configuration says."""
        return cls(since, config.compression.policy.label, Lifetimes.of(config.prefix_cache))


@dataclass(frozen=True, slots=True)
class Round:
    """What is to be replayed. `now` are the settings in force, with sizes in bytes."""

    start: Start
    now: Config
    defaults: Sequence[Default]  # by time, the first since always
    changed: float  # Unix time since which `now` is in force; 0: since the start
    candidates: Sequence[WhatIfCandidate]
    stored_bytes: int | None = None  # of prefixes in all replicas, when the records were taken; None if unknown
    quality: Path | None = None

    @property
    def records(self) -> Sequence[RequestRecord]:
        """Return the requests, by arrival."""
        return self.start.records


@dataclass(frozen=True, slots=True)
class Basis:
    """What a round rests on: the first that it yields."""

    requests: int
    warm_up: int  # of them, the first, which only let the caches settle
    seconds: float  # from the first arrival to the last
    step_times: str  # where they come from
    held_blocks: int | None  # in all replicas when it began; None: unknown, the replays start from empty caches
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """A candidate's figures, or why it has none. Of the settings in force also what was measured, and the error."""

    candidate: WhatIfCandidate
    prediction: Prediction | None = None
    now: Prediction | None = None  # the settings in force, in the same round
    fault: str = ""
    measured: Values | None = None
    error: Values | None = None  # predicted against measured, of the requests under the settings in force
    judged: int = 0  # requests that the error rests on


def replays(work: Round) -> Iterator[Basis | Replayed]:
    """Replay a round: its basis, the settings in force, each candidate, the best combination if any is better."""
    start, notes = work.start.within(work.now.prefix_cache.ttls), list[str]()
    if gone := len(work.records) - len(start.records):
        notes.append(f"{gone} requests name TTLs that are no more, and are left out")
    work = replace(work, start=start)
    records = list(start.records)
    count = max(start.early, warm_up(records, max(work.now.prefix_cache.ttls.values())))
    enough = int(log_fit.measured(columns_of(records)).sum()) >= log_fit.ENOUGH
    times, origin = choose_cost(records, work.now, recorded_policy(), "log" if enough else "config")
    curves: Mapping[str, sweep_quality.Curve] = {}
    if work.quality is not None:
        try:
            curves = sweep_quality.read(work.quality)
        except UserError as error:
            notes.append(f"quality is unknown: {error}")
    span = records[-1].arrival - records[0].arrival if records else 0.0
    held = None if start.held is None else sum(len(held) for each in start.held for held in each.tiers.values())
    yield Basis(len(records), count, span, origin, held, tuple(notes))
    replayer = _Replayer(work, count, times, curves)
    now = replayer.predict(work.now)
    yield replayer.judged(now)
    predictions, tried = {NOW: now}, dict[str, WhatIfCandidate]()
    for candidate in work.candidates:
        done = replayer.replayed(candidate, now)
        if done.prediction is not None:
            predictions[candidate.name], tried[candidate.name] = done.prediction, candidate
        yield done
    if (best := _search(replayer, now, predictions, tried)) is not None:
        yield best


def _search(
    replayer: _Replayer, now: Prediction, predictions: Mapping[str, Prediction], tried: Mapping[str, WhatIfCandidate]
) -> Replayed | None:
    """Combine what is better than the present, the best first, as long as that makes it better still.

    Only settings that a running service can take are combined. None if no combination is better than its parts.
    """
    order = ranked(predictions, NOW)
    better = [name for name in order[: order.index(NOW)] if not tried[name].restart]
    if not better:
        return None
    best, changes, prediction, replayed = None, tried[better[0]].changes, predictions[better[0]], 0
    for name in better[1:]:
        joined = combined(changes, tried[name].changes)
        if joined is None or replayed == SEARCHED:
            continue
        replayed += 1
        done = replayer.replayed(WhatIfCandidate(BEST, joined, proposed=True), now)
        if done.prediction is not None:
            order = ranked({NOW: now, "before": prediction, "after": done.prediction}, NOW)
            if order.index("after") < order.index("before"):
                best, changes, prediction = done, joined, done.prediction
    return best


class _Replayer:
    """Replays the records of a round under one configuration after the other."""

    def __init__(self, work: Round, counted: int, times: StepTimes, curves: Mapping[str, sweep_quality.Curve]) -> None:
        self._work, self._counted, self._times, self._curves = work, counted, times, curves
        self._free = named_no_policy(work.records, work.defaults)
        self._inputs: dict[str, ReplayInputs] = {}  # by the policy of requests that named none
        self._prompts = Counter(record.input_tokens for record in work.records[counted:])

    def predict(
        self, config: Config, counted: int | None = None, past: Sequence[tuple[float, Lifetimes]] = ()
    ) -> Prediction:
        """Return the figures of records from `counted` on. Raises UserError where they cannot be replayed so."""
        spec = config.compression.policy
        label = spec.label
        if label not in self._inputs:
            records = [
                replace(record, policy=label) if free and record.policy != label else record
                for record, free in zip(self._work.records, self._free, strict=True)
            ]
            self._inputs[label] = ReplayInputs(records)
        inputs = self._inputs[label]
        return predict(
            inputs.records,
            self._counted if counted is None else counted,
            config,
            self._times,
            inputs=inputs,
            held=self._work.start.held or (),
            past=past,
            quality=lambda: sweep_quality.retention(self._curves, spec, self._prompts),
        )

    def replayed(self, candidate: WhatIfCandidate, now: Prediction) -> Replayed:
        """Return a candidate's figures, or its fault."""
        try:
            return Replayed(candidate, self.predict(check(self._work.now, candidate.changes)), now)
        except UserError as error:
            return Replayed(candidate, now=now, fault=str(error))

    def judged(self, now: Prediction) -> Replayed:
        """Compare present figures with measured ones, of requests that came since these settings are in force."""
        work, counted = self._work, self._counted
        present = Replayed(WhatIfCandidate(NOW, {}), now, now, measured=self._measured(counted))
        first = next((n for n in range(counted, len(work.records)) if work.records[n].arrival >= work.changed), None)
        judged = 0 if first is None else len(work.records) - first
        if first is None or judged < log_fit.ENOUGH:
            return replace(present, judged=judged)
        past = lifetimes_of(work.defaults, work.records[0].arrival)
        own = now if first == counted and not past else self.predict(work.now, first, past)
        truth = self._measured(first)
        error = differences({name: value for name, value in own.figures.items() if name in truth}, truth)
        return replace(present, error=error, judged=judged)

    def _measured(self, first: int) -> Values:
        measured = measure(self._work.records[first:], self._work.now)
        stored = self._work.stored_bytes
        return measured if stored is None else {**measured, "resident_bytes_end": float(stored)}


def lifetimes_of(defaults: Sequence[Default], begun: float) -> Sequence[tuple[float, Lifetimes]]:
    """Return the lifetimes since a time, by when each came into force; none if they were always the last ones."""
    at = max(0, bisect_right([default.since for default in defaults], begun) - 1)
    found = [(default.since, default.lifetimes) for default in defaults[at:]]
    return found if any(lifetimes != found[-1][1] for _, lifetimes in found) else ()


def named_no_policy(records: Sequence[RequestRecord], defaults: Sequence[Default]) -> list[bool]:
    """Return for each record whether its policy is that which requests got by default when it came."""
    starts = [default.since for default in defaults]
    return [record.policy == defaults[max(0, bisect_right(starts, record.arrival) - 1)].policy for record in records]

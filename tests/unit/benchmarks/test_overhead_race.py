"""The race of the service with and without its metrics or the what-if service: its ratios, and what it replays."""

from __future__ import annotations

from typing import Any

from benchmarks.overhead.services import TimedRecorder
from benchmarks.overhead.traffic import requests_of
from benchmarks.overhead_race import LOADS, ratios_of, shares_of
from benchmarks.served.load import Measured
from warmkv import recorders, telemetry
from warmkv.config import load
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts
from warmkv.simulator.studies.replays import log_fit
from warmkv.simulator.studies.replays.replay import replay
from warmkv.simulator.studies.replays.variants import Variant


def measured(seconds: float, gateway: float, **more: float) -> Measured:
    return Measured(wall=seconds, tokens=1000, cpu={"gateway": gateway, "replica": 1.0, **more})


def test_ratios_are_taken_pair_by_pair_and_held_to_the_targets():
    having = [measured(1.0, 0.01, replay=0.5), measured(2.0, 0.01, replay=0.5), measured(4.0, 0.01, replay=0.5)]
    without = [measured(0.99, 0.0), measured(1.98, 0.0), measured(4.0, 0.0)]
    figures = {each.name: each for each in ratios_of(LOADS[0], having, without)}
    throughput, cpu = (figures[f"whatif_{LOADS[0].name}_{name}_vs_without"] for name in ("throughput", "cpu"))
    assert (throughput.value, throughput.met) == (0.99, True)
    assert cpu.value is not None
    assert (round(cpu.value, 3), cpu.met) == (1.01, True)
    assert figures[f"whatif_{LOADS[0].name}_replay_cores"].value == 0.25
    (slow, *_) = ratios_of(LOADS[0], without, [measured(0.5, 0.0)] * 3)
    assert slow.met is False


def test_the_share_of_recording_is_of_gateways_and_replicas_alone():
    runs = [measured(2.0, 1.0, agent=0.5)] * 3
    share, per_second, agent = shares_of(LOADS[0], runs, [0.02, 0.03, 0.1])
    assert (share.value, share.met) == (0.015, True)
    assert (per_second.value, agent.value) == (500.0, 0.25)
    (much, *_) = shares_of(LOADS[0], runs, [0.05] * 3)
    assert much.met is False


def test_the_calls_that_record_are_timed(monkeypatch):
    told: list[float] = []

    class Counter:
        def __init__(self, name: str, **options: Any) -> None: ...
        def set_default_tags(self, tags: dict[str, str]) -> None: ...
        def inc(self, value: float, tags: dict[str, str]) -> None:
            told.append(value)

    monkeypatch.setattr("ray.util.metrics.Counter", Counter)
    monkeypatch.setattr(recorders, "FLUSH_SECONDS", 1e6)
    recorder = TimedRecorder(telemetry.REJECTED, application="a")
    assert recorder.seconds == 0
    for _ in range(100):
        recorder.add(telemetry.REJECTED, 1, reason="a")
    counted = recorder.seconds
    recorder.flush()
    assert told == [100]
    assert 0 < counted < recorder.seconds


def test_what_is_replayed_beside_the_load_can_be_replayed_and_fitted():
    records = requests_of(60, "tiny")
    assert log_fit.measured(columns_of(records)).tolist() == [True] * 60
    cost = StepCost(0.005, 1e-3, 1e-6)
    (result,) = replay(records, load(flags=[], environ={}), [Variant()], UniformCosts(PhaseCosts(cost, cost)))
    assert (result.requests, result.refused) == (60, 0)

"""The race of the service with and without its metrics or the what-if service: its ratios, and what it replays."""

from __future__ import annotations

from benchmarks.overhead.services import NullRecorder
from benchmarks.overhead.traffic import requests_of
from benchmarks.overhead_race import LOADS, figures_of
from benchmarks.served.load import Measured
from warmkv import telemetry
from warmkv.config import load
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts
from warmkv.simulator.studies import log_fit
from warmkv.simulator.studies.replay import replay
from warmkv.simulator.studies.variants import Variant


def measured(seconds: float, gateway: float, **more: float) -> Measured:
    return Measured(wall=seconds, tokens=1000, cpu={"gateway": gateway, "replica": 1.0, **more})


def test_ratios_are_taken_pair_by_pair_and_held_to_the_targets():
    having = [measured(1.0, 0.01, agent=0.5), measured(2.0, 0.01, agent=0.5), measured(4.0, 0.01, agent=0.5)]
    without = [measured(0.99, 0.0), measured(1.98, 0.0), measured(4.0, 0.0)]
    figures = {each.name: each for each in figures_of("metrics", LOADS[0], having, without)}
    throughput, cpu = (figures[f"metrics_{LOADS[0].name}_{name}_vs_without"] for name in ("throughput", "cpu"))
    assert (throughput.value, throughput.met) == (0.99, True)
    assert cpu.value is not None
    assert (round(cpu.value, 3), cpu.met) == (1.01, True)
    assert figures[f"metrics_{LOADS[0].name}_agent_cores"].value == 0.25
    (slow, *_) = figures_of("whatif", LOADS[0], without, [measured(0.5, 0.0)] * 3)
    assert slow.met is False


def test_the_peer_records_nothing_and_everything_can_be_recorded_with_it():
    recorder: telemetry.Recorder = NullRecorder(*telemetry.ALL, application="a")
    for metric in telemetry.ALL:
        labels = dict.fromkeys(metric.labels, "x")
        for record in (recorder.add, recorder.grow, recorder.set, recorder.observe):
            record(metric, 1.0, **labels)
        recorder.forget(metric)


def test_what_is_replayed_beside_the_load_can_be_replayed_and_fitted():
    records = requests_of(60, "tiny")
    assert len(log_fit.measured(records)) == 60
    cost = StepCost(0.005, 1e-3, 1e-6)
    (result,) = replay(records, load(flags=[], environ={}), [Variant()], UniformCosts(PhaseCosts(cost, cost)))
    assert (result.requests, result.refused) == (60, 0)

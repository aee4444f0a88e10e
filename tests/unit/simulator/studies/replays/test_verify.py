"""A log that the simulated cluster wrote is verified to the token; one that was tampered with is not."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.unit.simulator.conversations import run, with_timings
from warmkv.cli import app
from warmkv.config import load
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts
from warmkv.simulator.studies.replays.bills import billed
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.studies.replays.verify import verify
from warmkv.simulator.workload import generator
from warmkv.simulator.workload.sessions import Workload

TIMES = UniformCosts(PhaseCosts(StepCost(0.005, 1e-4, 5e-7), StepCost(0.003, 4e-4, 1e-6)), 0.01)
FLAGS = ["cluster.replicas=2", "prefix_cache.memory_bytes=8MiB", "prefix_cache.ttls={5m: 60, 1h: 3600}"]


@pytest.fixture(scope="module")
def live():
    """A log with evictions and expirations, as its cluster would have written it, and the settings."""
    settings = load(flags=FLAGS, environ={})
    shape = Workload(sessions=30, hours=0.1, think_scale=0.05)
    records = generator.generate(shape, np.random.SeedSequence(3), settings)
    jobs, outcome = run(records, settings, cost=replace(TIMES, overhead=0.0))
    lifetimes = prepare(records, settings, Variant())[1]
    bills = [billed(job, lifetimes) for job in jobs]
    log = [
        replace(r, usage=usage) for r, usage in zip(with_timings(jobs, offset=0.0, outside=0.01), bills, strict=True)
    ]
    assert outcome.removals.evicted > 0 < outcome.removals.expired
    return log, settings, outcome.removals


def test_a_replay_as_it_was_gives_what_was(live):
    log, settings, removals = live
    names = {"replica-0": "b-second", "replica-1": "a-first"}  # whatever they are called
    verdict = verify([replace(r, replica=names[r.replica]) for r in log], settings, TIMES)
    assert (verdict.equal_hits, verdict.equal_bills, verdict.equal_slots, verdict.hit_error) == (1, 1, 1, 0)
    assert (verdict.evictions, verdict.expirations) == (removals.evicted, removals.expired)
    assert verdict.times.worst < 1e-9
    assert not verdict.misses


def test_what_differs_is_told(live):
    log, settings, _ = live
    slow = [replace(r, cached_tokens=0, ttft=2 * r.ttft, e2e=2 * r.e2e) if n % 2 else r for n, r in enumerate(log)]
    misses = " ".join(verify(slow, settings, TIMES).misses)
    for part in ("equal for", "in total", "TTFT p90", "E2E p90"):
        assert part in misses
    small = verify(log, load(flags=[*FLAGS, "engine.max_context=400"], environ={}), TIMES)
    assert "refused" in small.misses[0]
    served = [r for r in log if r.input_tokens + r.output_tokens <= 400]
    assert len(served) == len(log) - small.refused
    assert 0 < small.live_hit_tokens == sum(r.cached_tokens for r in served)


def test_answers_of_one_token_have_no_time_between_tokens(live):
    log, settings, _ = live
    times = verify([replace(record, output_tokens=1) for record in log], settings, TIMES).times
    assert set(times.measured) == set(times.simulated) == set(times.error) == {"ttft", "e2e"}


def test_the_command(live, tmp_path):
    log, _, _ = live
    file = tmp_path / "access.jsonl"
    file.write_text("".join(record.to_json() + "\n" for record in log))
    flags = [word for flag in FLAGS for word in ("--set", flag)]
    shown = CliRunner().invoke(app, ["verify", str(file), *flags])
    assert shown.exit_code == 0, shown.output
    assert "hit tokens" in shown.output
    told = CliRunner().invoke(app, ["verify", str(file), *flags, "--json"])
    found = json.loads(told.stdout)
    assert found["equal_hits"] == 1
    assert found["step_times"]["overhead_seconds"] == pytest.approx(0.01, rel=0.2)
    other = CliRunner().invoke(app, ["verify", str(file), "--set", "prefix_cache.enabled=false", "--json"])
    assert other.exit_code == 1
    assert json.loads(other.stdout)["simulated_hit_tokens"] == 0


def test_what_is_no_log_of_a_live_run_is_told_so(tmp_path):
    file = tmp_path / "w.jsonl"
    assert CliRunner().invoke(app, ["workload", "--sessions", "3", "--out", str(file)]).exit_code == 0
    told = CliRunner().invoke(app, ["verify", str(file)])
    assert told.exit_code == 2
    assert "the log names no replica and reports no usage" in told.stderr.replace("\n", " ")

"""Replicas that die: nothing is lost, and what had begun goes on elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, TWO_ROOFS, config, logs, record, run, uniform
from warmkv.config import ConfigError
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cluster.cluster import simulate
from warmkv.simulator.studies.replays.bills import billed
from warmkv.simulator.studies.replays.replay import prepare, replay, summarise
from warmkv.simulator.studies.replays.variants import Variant

FAILURE = st.builds(
    "{{at: {}, replica: {}, seconds: {}}}".format,
    st.integers(0, 640).map(lambda tick: tick / 64),
    st.integers(0, 1),
    st.sampled_from([0, 0.125, 3]),
)
FAILURES = st.lists(FAILURE, min_size=1, max_size=4).map(lambda some: f"simulator.failures=[{', '.join(some)}]")
SETTINGS = st.sampled_from(
    [
        (),
        ("simulator.startup_seconds=0",),
        ("engine.max_slots=1", "engine.step_tokens=3", "simulator.startup_seconds=1"),
        ("simulator.index_delay=0.25", "cluster.gateways=2"),
        ("cluster.replicas=3", "prefix_cache.memory_bytes=60B", "prefix_cache.host.memory_bytes=120B"),
        ("engine.max_queue=1", "cluster.max_queued_requests=2"),
    ]
)


PATIENT = ("gateway.retries=1000",)


def failing(*flags):
    return config("cluster.replicas=2", *PATIENT, *flags)


def times(jobs):
    return [
        (job.replica, job.started, job.first, job.finished, job.reused, job.read, job.retries, job.resumptions)
        for job in jobs
    ]


@given(logs(), FAILURES, SETTINGS, st.sampled_from([EXACT, uniform(TWO_ROOFS)]))
def test_fast_forward_equals_stepping(records, failures, flags, cost):
    settings = failing(failures, *flags)
    fast, fast_outcome = run(records, settings, cost=cost)
    slow, slow_outcome = run(records, settings, cost=cost, fast_forward=False)
    assert times(fast) == times(slow)
    assert fast_outcome.end == slow_outcome.end
    assert (fast_outcome.slots.peak, fast_outcome.stored.peak) == (slow_outcome.slots.peak, slow_outcome.stored.peak)


@given(logs(), FAILURES, SETTINGS)
def test_nothing_is_lost_and_time_runs_forward(records, failures, flags):
    settings = failing(failures, *flags)
    jobs, outcome = run(records, settings)
    assert [job.record for job in jobs] == records
    for job in jobs:
        if job.replica:
            assert job.arrival <= job.started < job.first <= job.finished <= outcome.end
        else:
            assert (job.started, job.first, job.finished) == (-1, -1, -1)
    if not any("max_queued" in flag for flag in flags):
        assert all(job.replica for job in jobs)
    assert outcome.slots.value == 0
    assert sum(level.value for level in outcome.tiers.values()) == outcome.stored.value
    assert 0 <= outcome.alive.value <= settings.cluster.replicas == outcome.alive.peak


@given(logs(), FAILURES, SETTINGS)
def test_every_token_of_a_prompt_is_billed_once(records, failures, flags):
    settings = failing(failures, *flags)
    jobs, lifetimes = prepare(records, settings, Variant())
    outcome = simulate(jobs, settings, lifetimes, kv_shape(settings).token_bytes, EXACT)
    result = summarise(jobs, outcome, settings, lifetimes, Variant()).result
    served = [job for job in jobs if job.replica]
    assert [billed(job, lifetimes).prompt for job in served] == [job.record.input_tokens for job in served]
    assert result.usage.output == sum(job.record.output_tokens for job in served)
    assert (result.retries, result.resumptions) == (
        sum(job.retries for job in jobs),
        sum(job.resumptions for job in jobs),
    )


@given(logs(), FAILURES)
def test_the_same_run_gives_the_same(records, failures):
    settings = failing(failures)
    assert times(run(records, settings)[0]) == times(run(records, settings)[0])


@given(logs())
def test_failures_after_the_end_change_nothing(records):
    late = "simulator.failures=[{at: 100000, replica: 0}]"
    (jobs, outcome), (again, same) = run(records, failing()), run(records, failing(late))
    assert times(jobs) == times(again)
    assert outcome.alive.mean(outcome.end) == same.alive.mean(same.end) == 2


def test_a_request_that_had_begun_goes_on_elsewhere_by_hand():
    """It fails in its 3rd decode step. The other replica computes its prompt again and decodes it from the start."""
    a, b, c = EXACT.a, EXACT.b, EXACT.c
    prefill = a + b * 8 + c * 8
    decode = [a + b + c * entries for entries in range(9, 13)]
    at = prefill + sum(decode[:2]) + 2**-10
    (job,), outcome = run([record(0.0, [1] * 8, output=5)], failing(f"simulator.failures=[{{at: {at}}}]"))
    assert (job.replica, job.retries, job.resumptions) == ("replica-1", 0, 1)
    assert (job.started, job.first) == (0.0, prefill)
    assert job.finished == at + prefill + sum(decode)
    assert outcome.stored.peak == 8 * 2  # those of the first are gone before the second has any


def test_a_request_that_had_not_begun_is_sent_again():
    records = [record(0.0, [number] * 8, output=3) for number in range(4)]
    at = 2**-10  # both compute their first prompts, and one request waits in each
    jobs, _ = run(records, failing(f"simulator.failures=[{{at: {at}}}]", "engine.max_slots=1"))
    assert [job.replica for job in jobs] == ["replica-1"] * 4
    assert [job.retries for job in jobs] == [1, 0, 1, 0]
    assert not any(job.resumptions for job in jobs)
    assert jobs[0].started > at


def test_a_request_is_sent_again_as_often_and_as_soon_as_the_gateway_does():
    """Its replicas fail in turn while it computes its prompt, which takes 68 ms."""
    failures = [(0.05, 0), (0.1, 1), (0.65, 0), (0.65, 1)]
    listed = ", ".join(f"{{at: {at}, replica: {place}, seconds: 0}}" for at, place in failures)
    flags = ("simulator.startup_seconds=0", f"simulator.failures=[{listed}]")
    for most, started in ((3, 0.65 + 1.0), (2, -1), (0, -1)):
        (job,), outcome = run([record(0.0, [1] * 20, output=5)], failing(*flags, f"gateway.retries={most}"))
        assert (bool(job.replica), job.retries, job.failed) == (most == 3, most, most < 3)
        assert job.started == pytest.approx(started)
        assert outcome.slots.value == 0


def test_requests_of_a_lost_replica_wait_in_line_where_the_others_are_full():
    records = [record(0.0, [number] * 8, output=50, name=str(number)) for number in range(4)]
    jobs, _ = run(records, failing("simulator.failures=[{at: 0.1}]", "engine.max_slots=1", "engine.max_queue=1"))
    assert [job.replica for job in jobs] == ["replica-1"] * 4
    assert [(job.retries, job.resumptions) for job in jobs] == [(0, 1), (0, 0), (1, 0), (0, 0)]
    assert jobs[0].submitted == jobs[1].finished


def test_what_is_not_sent_again_fails_with_its_replica_also_where_it_had_begun():
    flags = ("simulator.failures=[{at: 0.1}]", "gateway.retries=0")
    records = [record(0.0, [number] * 8, output=50, name=str(number)) for number in range(4)]
    jobs, _ = run(records, failing(*flags, "engine.max_slots=1"))
    assert [(job.failed, job.retries) for job in jobs] == [(True, 0), (False, 0), (True, 0), (False, 0)]
    result = replay(records, failing(*flags, "engine.max_slots=1"), [Variant()], EXACT)[0]
    assert (result.failed, result.refused, result.retries) == (2, 0, 0)
    assert result.usage.output == 2 * 50


def test_requests_wait_while_no_replica_is_there_and_as_many_as_may():
    failure = "simulator.failures=[{at: 1, replica: 0, seconds: 2}]"
    flags = (failure, "simulator.startup_seconds=4", "cluster.max_queued_requests=2")
    records = [record(2.0, [number] * 8, name=str(number)) for number in range(3)]
    jobs, outcome = run([record(0.0, [9] * 8), *records], config(*flags))
    assert [job.replica for job in jobs] == ["replica-0", "replica-0.1", "replica-0.1", ""]
    assert jobs[1].started == 1 + 2 + 4
    assert outcome.alive.mean(outcome.end) * outcome.end == pytest.approx(outcome.end - 2)  # seconds of replicas


def test_a_place_that_is_lost_already_cannot_fail():
    twice = "simulator.failures=[{at: 0.5, replica: 1, seconds: 9}, {at: 1, replica: 1, seconds: 0}]"
    jobs, outcome = run([record(0.0, [1] * 8), record(5.0, [2] * 8, output=999)], failing(twice))
    assert {job.replica for job in jobs} == {"replica-0"}
    assert outcome.alive.peak == 2
    assert outcome.alive.value == 2  # the one that started after nine seconds


def test_what_a_replica_held_is_cold_again():
    records = [record(0.0, [1] * 40, name="first"), record(20.0, [1] * 40, name="second")]
    failure = "simulator.failures=[{at: 10, seconds: 0}]"
    flags = ("simulator.startup_seconds=1", "prefix_cache.enabled=true")
    jobs, outcome = run(records, config(failure, *flags))
    assert [job.reused for job in jobs] == [0, 0]
    assert outcome.stored.value == 40 * 2
    assert [job.reused for job in run(records, config(*flags))[0]] == [0, 39]


def test_a_failure_of_a_replica_that_is_never_there_is_refused():
    with pytest.raises(ConfigError, match="no replica 2 of 2; the first is 0"):
        failing("simulator.failures=[{at: 0, replica: 2}]")

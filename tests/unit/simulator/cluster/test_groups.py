"""Replicas of several kinds in one replay, against replays of one kind each."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, config, logs, record, run
from warmkv.policies.contents import Contents
from warmkv.policies.prefix_tree.held import HeldBlock
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cluster.cluster import simulate
from warmkv.simulator.steps.costs import GroupTimes, StepCost
from warmkv.simulator.studies.replays.replay import prepare, replay
from warmkv.simulator.studies.replays.replay import run as replayed
from warmkv.simulator.studies.replays.variants import Variant, VariantError

BOTH = "cluster.groups={vllm: {engine: {kind: vllm, kv_bytes: 512}, prefix_cache: {memory_bytes: 512}}}"
APART = (  # the one serves `full` alone, the other `full+fp8`
    "engine.kind=vllm",
    "engine.kv_bytes=600",
    "prefix_cache.memory_bytes=200",
    "cluster.groups={fp8: {engine: {max_slots: 2}, prefix_cache: {storage: fp8, memory_bytes: 64}}}",
)
SLOW = StepCost(2**-5, 2**-9, 2**-15)


def told(job):
    return (
        job.submitted - job.arrival, job.started - job.arrival, job.first - job.arrival, job.finished - job.arrival,
        job.reused, job.hit, job.blocks_found, job.written, job.read, job.num_preemptions,
    )  # fmt: skip


@given(logs(("full", "snapkv@6", "streaming_llm@0.5")), st.booleans())
def test_a_request_runs_where_its_policy_can_be_served(records, fast_forward):
    jobs, _ = run(records, config(BOTH, "cluster.replicas=2"), fast_forward=fast_forward)
    assert all(job.replica for job in jobs)
    assert not any(job.replica.startswith("replica-vllm") for job in jobs if job.record.policy != "full")


@given(logs(("full", "full+fp8")))
def test_groups_that_share_no_request_are_as_two_services(records):
    """Give each group sizes, formats, batches and step times of its own."""
    whole, times = config(*APART), {"": EXACT, "fp8": SLOW}
    jobs, outcome = run(records, whole, cost=GroupTimes(times))
    expected, evicted = {}, 0
    for name, group in whole.groups().items():
        own = [one for one in records if (one.policy == "full+fp8") == (name == "fp8")]
        alone, alone_outcome = run(own, group, cost=times[name])
        expected |= {job.record.id: (told(job), bool(job.replica)) for job in alone}
        evicted += alone_outcome.removals.evicted
    assert {job.record.id: (told(job), bool(job.replica)) for job in jobs} == expected
    assert outcome.removals.evicted == evicted


@given(logs(), st.sampled_from(["prefix_cost", "least_loaded", "power_of_two", "round_robin"]), st.sampled_from([1, 2]))
def test_a_group_of_the_same_kind_is_more_replicas(records, policy, gateways):
    """Compare with more replicas that move no blocks to the others."""
    flags = (f"routing.policy={policy}", f"cluster.gateways={gateways}", "routing.transfer=false")
    apart, outcome = run(records, config("cluster.groups={more: {cluster: {replicas: 2}}}", *flags))
    together, expected = run(records, config("cluster.replicas=3", *flags))
    names = {"replica-0": "replica-0", "replica-1": "replica-more-0", "replica-2": "replica-more-1", "": ""}
    assert [(told(job), job.replica) for job in apart] == [(told(job), names[job.replica]) for job in together]
    assert outcome.stored.value == expected.stored.value
    assert outcome.alive.value == expected.alive.value == 3


def test_the_queue_of_a_replica_begins_behind_the_slots_of_its_group():
    """Ask at once for what the first replica, of one slot, has warm: what would wait there goes to the other one."""
    shared = [record(0.0, range(9)), *(record(9.0, range(9)) for _ in range(7))]
    flags = ("engine.max_slots=1", "routing.load_weight=0", "routing.transfer=false", "simulator.index_delay=0")
    there = []
    for slots in (1, 8):
        jobs, _ = run(shared, config(f"cluster.groups={{more: {{engine: {{max_slots: {slots}}}}}}}", *flags))
        there.append([job.replica for job in jobs].count("replica-more-0"))
    assert there[0] < there[1]


def test_what_waits_for_one_group_is_not_given_to_another():
    """Let the only replica of a group die: its requests wait until there is another one."""
    failing = "simulator.failures=[{at: 1, replica: 0, seconds: 2}]"
    settings = config(BOTH, failing, "simulator.startup_seconds=3")
    asked = [(0.0, "snapkv@6"), (1.5, "snapkv@6"), (2.0, "full")]
    records = [record(at, [number] * 9, policy=policy) for number, (at, policy) in enumerate(asked)]
    first, second, third = run(records, settings)[0]
    assert first.replica == "replica-0"
    assert (second.replica, second.started >= 6.0) == ("replica-0.1", True)
    assert (third.replica, third.started) == ("replica-vllm-0", 2.0)


def test_who_waits_for_one_group_takes_no_place_of_those_that_wait_for_another():
    """Let the only replica of each group die: of each as many may wait."""
    failing = "simulator.failures=[{at: 1, seconds: 2}, {at: 1, group: fp8, seconds: 2}]"
    settings = config(*APART, failing, "simulator.startup_seconds=3", "cluster.max_queued_requests=1")
    asked = [(0.0, "full"), (2.0, "full+fp8"), (2.0, "full"), (2.0, "full+fp8"), (2.0, "full")]
    records = [record(at, [number] * 9, policy=policy) for number, (at, policy) in enumerate(asked)]
    assert [bool(job.replica) for job in run(records, settings)[0]] == [True, True, True, False, False]


def test_who_waits_for_a_full_group_holds_up_nobody_who_may_go_elsewhere():
    settings = config(BOTH, "engine.max_slots=1", "engine.max_queue=1")
    asked = ["snapkv@6"] * 5 + ["full"] * 4  # of which each group takes two
    records = [record(n * 2**-12, [n] * 9, 9, policy=policy, name=str(n)) for n, policy in enumerate(asked)]
    jobs, _ = run(records, settings)
    assert all(job.replica == "replica-0" for job in jobs[:5])
    assert [(job.replica, job.submitted) for job in jobs[5:7]] == [("replica-vllm-0", job.arrival) for job in jobs[5:7]]
    assert (jobs[2].submitted, jobs[7].submitted) == (jobs[0].finished, jobs[5].finished)


def test_a_replica_of_a_group_fails_by_its_name():
    failing = "simulator.failures=[{at: 1, group: fp8, seconds: 2}]"
    settings = config(*APART, failing, "simulator.startup_seconds=3")
    asked = [(0.0, "full+fp8"), (1.5, "full+fp8"), (2.0, "full")]
    records = [record(at, [number] * 9, policy=policy) for number, (at, policy) in enumerate(asked)]
    first, second, third = run(records, settings)[0]
    assert first.replica == "replica-fp8-0"
    assert (second.replica, second.started >= 6.0) == ("replica-fp8-0.1", True)
    assert (third.replica, third.started) == ("replica-0", 2.0)


@pytest.mark.parametrize(
    ("failure", "fault"),
    [
        ("{at: 1, group: other}", "no group 'other' in cluster.groups, which has fp8"),
        ("{at: 1, group: fp8, replica: 1}", "no replica 1 of 1"),
    ],
)
def test_failures_of_what_is_not_there_are_refused(failure, fault):
    with pytest.raises(ValueError, match=fault):
        config(*APART, f"simulator.failures=[{failure}]")


def test_each_group_is_scaled_by_its_own_requests():
    scaling = "{min_replicas: 1, max_replicas: 4, target_ongoing_requests: 1, upscale_delay_seconds: 0}"
    settings = config(
        "cluster.groups={own: {engine: {kind: warmkv}, cluster: {autoscaling: " + scaling + "}}}",
        "engine.kind=vllm", "engine.max_slots=8", "simulator.startup_seconds=1",
    )  # fmt: skip
    records = [record(0.0, [number] * 9, 4000, policy="snapkv@6", name=f"s{number}") for number in range(6)]
    _, outcome = run(records, settings)
    assert outcome.alive_of["own"].peak == 4
    assert outcome.alive_of[""].peak == 1
    assert outcome.alive.peak == 5
    own = run([], settings)[1].alive_of["own"]
    assert own.peak == 1


def test_a_policy_that_no_group_serves_is_refused_by_its_name():
    settings = config("engine.kind=vllm", "cluster.groups={more: {}}")
    with pytest.raises(VariantError, match=r"request r: snapkv@6 cannot be had from an engine of kind vllm"):
        replayed([record(0.0, [1] * 9, policy="snapkv@6", name="r")], settings, Variant(), EXACT)


def test_a_replay_as_placed_follows_the_log_and_knows_its_groups():
    records = [
        replace(record(float(at), [1] * 9, name=str(at)), replica=name, group=group)
        for at, (name, group) in enumerate([("x", ""), ("y", "vllm"), ("x", ""), ("y", "vllm")])
    ]
    done = replayed(records, config(BOTH), Variant(), EXACT, as_placed=True)
    assert [job.replica for job in done.jobs] == ["x", "y", "x", "y"]
    assert [job.reused for job in done.jobs] == [0, 0, 8, 8]
    lost = [replace(one, group="gone") for one in records]
    with pytest.raises(VariantError, match="no group 'gone'"):
        replayed(lost, config(BOTH), Variant(), EXACT, as_placed=True)


def test_replicas_begin_with_what_those_of_their_group_held():
    ask = [record(1.7e9 + at, [1] * 9, policy=policy, name=policy) for at, policy in enumerate(["snapkv@6", "full"])]
    (key, more) = ask[0].hashes
    held = [
        HeldBlock(one, before, 8, 4, end, "t", 300.0, 1.7e9 + 300, 0.0, 0.0, 0, 1.7e9, 1.7e9)
        for one, before, end in ((key, b"", 4), (more, key, 8))
    ]
    settings = config(BOTH, "prefix_cache.ttls={5m: 300, 1h: 3600}", "routing.transfer=false")
    jobs, lifetimes = prepare(ask, settings, Variant())
    contents = [Contents(1.7e9, {"device": held}, "vllm")]
    simulate(jobs, settings, lifetimes, kv_shape(settings).token_bytes, EXACT, held=contents, begun=1.7e9)
    assert [(job.replica, job.reused) for job in jobs] == [("replica-0", 0), ("replica-vllm-0", 8)]


def test_gpus_are_counted_and_priced_by_group():
    gpu = "simulator: {gpu: {name: L4, dollars: 8, as_of: 2026-11-20}}, cluster: {replicas: 2, gpus_per_replica: 0.5}"
    settings = config(
        "cluster.groups={small: {" + gpu + "}}", "simulator.gpu={name: L4, dollars: 2, as_of: 2026-11-20}"
    )
    (result,) = replay([record(0.0, [1] * 9, 3000)], settings, [Variant()], EXACT)
    hours = result.seconds / 3600
    assert (result.replicas.peak, result.gpu_hours) == (3, pytest.approx(2 * hours))
    assert result.gpu_dollars == pytest.approx(hours * 2 + hours * 8)


@given(st.lists(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 9)))))
def test_gauges_together_are_their_sum_at_any_time(changes):
    import numpy as np

    gauges = [TimeWeightedGauge() for _ in changes]
    for gauge, own in zip(gauges, changes, strict=True):
        for amount, at in own:
            gauge.change(amount, float(at))
    times = np.arange(11.0)
    total = TimeWeightedGauge.together(gauges)
    assert total.at(times).tolist() == [sum(int(gauge.at(times)[at]) for gauge in gauges) for at in range(11)]

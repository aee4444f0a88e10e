"""A cluster that grows and shrinks: by hand, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.cluster.test_failures import FAILURES, PATIENT, times
from tests.unit.simulator.conversations import EXACT, TWO_ROOFS, config, logs, record, run, uniform
from warmkv.config import AutoscalingConfig
from warmkv.policies import transfer
from warmkv.simulator.cluster.autoscaler import Autoscaler

SCALING = st.builds(
    "cluster.autoscaling={{max_replicas: {}, target_ongoing_requests: {}, upscale_delay_seconds: {}, "
    "downscale_delay_seconds: {}}}".format,
    st.integers(1, 4),
    st.sampled_from([2**-10, 2**-6, 0.25, 2.0]),
    st.sampled_from([0, 3, 30]),
    st.sampled_from([0, 5, 12]),
)
SETTINGS = st.sampled_from(
    [
        (),
        ("simulator.startup_seconds=0",),
        ("engine.max_slots=1", "cluster.drain_seconds=0"),
        ("simulator.startup_seconds=2", "simulator.index_delay=0.5", "cluster.gateways=2"),
    ]
)


@given(logs(), SCALING, SETTINGS, st.none() | FAILURES, st.sampled_from([EXACT, uniform(TWO_ROOFS)]))
def test_nothing_is_lost_and_fast_forward_equals_stepping(records, scaling, flags, failures, cost):
    failures = [failures.replace("replica: 1", "replica: 0")] if failures else []
    settings = config(scaling, *PATIENT, *flags, *failures)
    fast, outcome = run(records, settings, cost=cost)
    slow, same = run(records, settings, cost=cost, fast_forward=False)
    assert times(fast) == times(slow)
    assert (outcome.end, outcome.alive.peak) == (same.end, same.alive.peak)
    assert [job.record for job in fast] == records
    for job in fast:
        assert job.arrival <= job.started < job.first <= job.finished <= outcome.end
    assert outcome.slots.value == 0
    assert outcome.stored.value == sum(level.value for level in outcome.tiers.values()) >= 0
    if not failures:
        assert outcome.alive.peak >= 1
        assert not any(job.retries or job.resumptions for job in fast) or "cluster.drain_seconds=0" in flags


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(-3, 5)), max_size=30),
    st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True),
    st.sampled_from([0, 14, 20, 30]),
)
def test_requests_in_flight_are_averaged_over_the_delay_of_starting_one_or_15_s(changes, moments, delay):
    """In halves of seconds."""
    look_back = 2 * max(15, delay)
    settings = AutoscalingConfig(max_replicas=1, upscale_delay_seconds=delay)
    scaler, count, left = Autoscaler(settings, 1), 0, sorted(changes)
    halves = [0] * 301  # requests in flight in each half second
    for at, by in left:
        halves[at:] = [max(0, count + by)] * (301 - at)
        count = halves[at]
    before = 0
    for moment in sorted(moments):
        while left and left[0][0] <= moment:
            at, by = left.pop(0)
            now = max(0, before + by)
            scaler.changed(now - before, at / 2)
            before = now
        window = halves[max(0, moment - look_back) : moment]
        scaler.report(moment / 2)
        assert scaler.ongoing == sum(window) / len(window)


def test_a_cluster_grows_under_load_and_shrinks_after_it_by_hand():
    """Two requests in flight want two replicas, and one wants one again."""
    flags = (
        "cluster.autoscaling={max_replicas: 3, target_ongoing_requests: 1.25, upscale_delay_seconds: 4, "
        "downscale_delay_seconds: 15}",
        "simulator.startup_seconds=5",
        "routing.policy=least_loaded",
    )
    long = [record(0.0, [number] * 8, output=900, name=str(number)) for number in range(2)]  # 28 s
    late = [record(at, [9] * 8, output=2, name=f"late {at}") for at in (18.9, 19.0, 40.0, 50.0, 60.0, 70.0, 71.0)]
    last = record(69.0, [5] * 8, output=600, name="last")  # 12 s
    jobs, outcome = run(sorted([*long, *late, last], key=lambda one: one.arrival), config(*flags))
    replicas = {job.record.id: job.replica for job in jobs}
    # The report at 10 s wants two; the second is started at 14 s and takes requests from 19 s on.
    assert replicas["late 18.9"] == "replica-0"
    assert replicas["late 19.0"] == "replica-1"
    # The reports at 40 and 50 s want fewer; at 55 s the newest goes.
    assert replicas["late 60.0"] == "replica-0"
    seconds = outcome.alive.mean(outcome.end) * outcome.end
    assert seconds == pytest.approx(outcome.end + (55 - 14))


def test_a_replica_that_is_stopped_ends_what_it_has_unless_that_takes_too_long():
    scaling = (
        "cluster.autoscaling={max_replicas: 2, target_ongoing_requests: 8, upscale_delay_seconds: 0, "
        "downscale_delay_seconds: 0}"
    )
    records = [record(0.0, [number] * 8, output=1200, name=str(number)) for number in range(2)]
    for drain, resumed in ((100, 0), (3, 1)):
        flags = (scaling, "cluster.replicas=2", f"cluster.drain_seconds={drain}")
        jobs, outcome = run(records, config(*flags))
        assert [job.resumptions for job in jobs] == [0, resumed]
        assert jobs[1].replica == f"replica-{1 - resumed}"
        gone = 10 + drain + transfer.START_SECONDS if resumed else jobs[1].finished  # with handing over
        assert outcome.alive.mean(outcome.end) * outcome.end == pytest.approx(outcome.end + gone)

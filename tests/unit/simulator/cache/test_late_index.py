"""What routers know late, against a slow walk through all that was sent."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import config, record, run
from warmkv.simulator.cache.late_index import LateIndex

RUNS, BLOCKS = range(5), 3
DEPTHS = st.tuples(*[st.integers(0, BLOCKS)] * 3).map(sorted).map(tuple)
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 30),  # time since the last event
        st.sampled_from(["a", "b"]),
        st.dictionaries(st.sampled_from(RUNS), DEPTHS, max_size=3),
    ),
    max_size=20,
)


def sendings(times, publish):
    """When each of these events of a replica is sent: it looks again `publish` after each time that it sent."""
    sent, clock, left = [], 0, list(times)
    while left:
        clock = max(clock, left[0])
        sent += [clock for time in left if time <= clock]
        left = [time for time in left if time > clock]
        clock += publish
    return sent


@given(EVENTS, st.integers(1, 12), st.integers(1, 20))
def test_reports_are_known_when_they_have_arrived(events, publish, delay):
    late, now, happened = LateIndex(publish, delay, [BLOCKS] * len(RUNS)), 0, []
    for gap, replica, held in events:
        now += gap
        late.happened(replica, dict(held), now)
        happened.append((now, replica, held))
    arrivals = {}
    for name in ("a", "b"):
        own = [number for number, event in enumerate(happened) if event[1] == name]
        times = sendings([happened[number][0] for number in own], publish)
        arrivals |= {number: sent + delay for number, sent in zip(own, times, strict=True)}
    for moment in sorted({at + aside for at in arrivals.values() for aside in (-1, 0)}):
        known = {"a": {}, "b": {}}
        for number, (_, replica, held) in enumerate(happened):
            if arrivals[number] <= moment:
                known[replica] |= held
        for number in RUNS:
            held = {name: runs[number] for name, runs in known.items() if runs.get(number, (0, 0, 0))[-1]}
            assert late.warm([number], moment) == held


def test_a_prompt_is_warm_up_to_its_first_gap_in_each_tier():
    late = LateIndex(1, 1, [2, 3, 1])
    late.happened("a", {0: (2, 2, 2), 1: (1, 2, 3), 2: (0, 0, 1)}, 0)
    assert late.warm([0, 1, 2], 2) == {"a": (3, 4, 6)}


def test_what_a_lost_replica_sent_is_never_known():
    late = LateIndex(1, 5, [1])
    late.happened("a", {0: (1, 1, 1)}, 0)
    late.happened("b", {0: (1, 1, 1)}, 0)
    late.drop_replica("a")
    assert set(late.warm([0], 100)) == {"b"}


def test_routers_send_elsewhere_what_they_do_not_know_to_be_warm():
    """Of idle replicas the warm one is better, once it is known; of equal ones that which was given less."""
    records = [record(4.0 * number, [1] * 40, name=str(number)) for number in range(4)]
    replicas = {}
    for delay in (0.0, 1.0, 5.0, 100.0):
        jobs, _ = run(records, config("cluster.replicas=3", f"simulator.index_delay={delay}"))
        replicas[delay] = [int(job.replica[-1]) for job in jobs]
    assert replicas[0.0] == replicas[1.0] == [0, 0, 0, 0]
    assert replicas[5.0] == [0, 1, 0, 1]  # the second comes before the first is known, the third after it
    assert replicas[100.0] == [0, 1, 2, 0]

"""What routers know late, against a slow walk through all that was sent."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import config, record, run
from warmkv.prefixes.index import PrefixIndex
from warmkv.simulator.cache.late_index import LateIndex

KEYS = [bytes([number]) * 8 for number in range(5)]
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 30),  # time since the last event
        st.sampled_from(["a", "b"]),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        st.sampled_from(["device", "host", "disk", None]),
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
    late, now, happened = LateIndex(publish, delay), 0, []
    for gap, replica, keys, tier in events:
        now += gap
        late.happened(replica, keys, tier, now)
        happened.append((now, replica, keys, tier))
    arrivals = {}
    for name in ("a", "b"):
        own = [number for number, event in enumerate(happened) if event[1] == name]
        times = sendings([happened[number][0] for number in own], publish)
        arrivals |= {number: sent + delay for number, sent in zip(own, times, strict=True)}
    for moment in sorted({at + aside for at in arrivals.values() for aside in (-1, 0)}):
        known = PrefixIndex()
        for number, (_, replica, keys, tier) in enumerate(happened):
            if arrivals[number] <= moment:
                known.remove(replica, keys) if tier is None else known.add(replica, keys, tier)
        seen = late.at(moment)
        for name in ("a", "b"):
            assert {k for k in KEYS if seen.holds(name, k)} == {k for k in KEYS if known.holds(name, k)}


def test_what_a_lost_replica_sent_is_never_known():
    late = LateIndex(1, 5)
    late.happened("a", KEYS[:1], "device", 0)
    late.happened("b", KEYS[:1], "device", 0)
    late.drop_replica("a")
    assert late.at(100).replicas == ("b",)


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

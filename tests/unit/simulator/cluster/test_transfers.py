"""Blocks that move between simulated replicas: by hand, and nothing is lost."""

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulator.cluster.test_autoscaling import SCALING
from tests.unit.simulator.cluster.test_failures import FAILURES, PATIENT, times
from tests.unit.simulator.conversations import EXACT, config, logs, record, run
from warmkv.policies import routing, transfer
from warmkv.simulator.cache.chains import MovedBlock
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cluster.cluster import Cluster, ReplicaKind
from warmkv.simulator.cluster.memory import resolved
from warmkv.simulator.cluster.stores import Levels, Stores, laid_out
from warmkv.simulator.cluster.transfers import ChainSlice, pieces_of
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant

EAGER = ("routing.load_weight=100", "routing.transfer=always", "transfer.byte_seconds=0.0009765625")
SLOW = ("gateway.stall_seconds=2.8125",)  # a thirtieth is enough for 16 tokens
PIECES = 12  # bytes: a block and a half
SETTINGS = st.sampled_from(
    [
        (),
        SLOW,
        ("prefix_cache.memory_bytes=0",),
        ("prefix_cache.enabled=false",),
        ("prefix_cache.memory_bytes=60B", "prefix_cache.host.memory_bytes=120B", "simulator.host_bandwidth=256"),
        ("prefix_cache.memory_bytes=40B", "prefix_cache.eviction=lfu"),
        ("simulator.index_delay=0.25", "cluster.gateways=2"),
        ("cluster.drain_seconds=0.6",),
    ]
)
PIECE_BYTES = st.sampled_from([PIECES, 20, transfer.PIECE_BYTES])


@pytest.fixture(autouse=True, scope="module")
def cheap_fetches():
    """Any block is worth a fetch."""
    quick = {"TRANSFER_START": 0, "TRANSFER_MIN_BLOCKS": 1, "START_SECONDS": 0.0625}
    with patch.multiple(transfer, **quick), patch.object(routing, "TRANSFER_START", 0):
        yield


def entry(name, size):
    return MovedBlock(name.encode(), 0, 0, size, (1.0, 1.0, 0.0, 0.0, 0), "")


POLICIES = ("full", "snapkv@6", "h2o@6", "streaming_llm@0.5")


def eager(*flags):
    return config("cluster.replicas=2", *EAGER, *PATIENT, *flags)


def moved(outcome):
    return outcome.moved.fetches, outcome.moved.fetched_bytes, outcome.moved.handed_bytes


@given(logs(POLICIES), SETTINGS, PIECE_BYTES, st.none() | FAILURES, st.none() | SCALING)
def test_nothing_is_lost_and_fast_forward_equals_stepping(records, flags, piece, failures, scaling):
    more = [failures] if failures else []
    if scaling:
        more = ["cluster.replicas=1", scaling, *(failure.replace("replica: 1", "replica: 0") for failure in more)]
    settings = eager(*flags, *more)
    with patch.object(transfer, "PIECE_BYTES", piece):
        fast, outcome = run(records, settings)
        slow, same = run(records, settings, fast_forward=False)
    assert times(fast) == times(slow)
    assert (outcome.end, moved(outcome), outcome.stored.peak) == (same.end, moved(same), same.stored.peak)
    for job in fast:
        assert job.arrival <= job.started < job.first <= job.finished <= outcome.end
        assert 0 <= job.reused <= job.record.input_tokens - job.recomputed
    assert outcome.slots.value == 0
    assert outcome.stored.value == sum(level.value for level in outcome.tiers.values())
    room = settings.prefix_cache.memory_bytes + settings.prefix_cache.host.memory_bytes
    assert outcome.stored.value >= 0
    assert outcome.stored.peak <= room * outcome.alive.peak


def test_transfers_occur_in_these_logs():
    """Else the test above says nothing."""
    fetched = []

    @settings(max_examples=100)
    @given(logs(POLICIES), SETTINGS)
    def run_them(records, flags):
        fetched.append(run(records, eager(*flags))[1].moved.fetches)

    run_them()
    assert sum(count > 0 for count in fetched) >= 5


def busy_then(*tokens_of_later, at=4.0):
    """Replica 0 has a prompt of 40 tokens, and a request that keeps it busy; then others come."""
    first = record(0.0, [1] * 40, name="first")
    busy = record(2.0, [1] * 4, output=500, name="busy")
    return [first, busy, *(record(at, tokens, name=f"later {n}") for n, tokens in enumerate(tokens_of_later))]


def test_a_prefix_is_fetched_by_hand():
    (_, busy, later), outcome = run(busy_then([1] * 40), eager())
    assert (busy.replica, later.replica) == ("replica-0", "replica-1")
    assert moved(outcome) == (1, 80, 0)
    assert later.started - later.arrival == 2**-4 + 80 * 2**-10
    assert later.reused == 39
    assert later.first - later.started == EXACT.seconds(1, 40)


def test_what_is_fetched_comes_once_for_all_who_wait():
    jobs, outcome = run(busy_then(*[[1] * 40] * 5), eager())
    later = [job for job in jobs[2:] if job.replica == "replica-1"]
    assert len(later) == 3
    assert moved(outcome) == (1, 80, 0)
    assert [job.reused for job in later] == [39] * 3


def test_what_is_slower_to_fetch_is_computed_unless_it_is_fetched_always():
    dear = "transfer.byte_seconds=1"
    (*_, later), outcome = run(busy_then([1] * 40), eager(dear, "routing.transfer=true"))
    assert (later.replica, later.reused, later.started) == ("replica-1", 0, later.arrival)
    assert (outcome.moved.fetches, outcome.moved.declined) == (0, 1)
    (*_, later), outcome = run(busy_then([1] * 40), eager(dear, "gateway.stall_seconds=3000"))
    assert (later.reused, outcome.moved.fetches, outcome.moved.declined) == (39, 1, 0)


@pytest.mark.parametrize(("piece", "reused"), [(transfer.PIECE_BYTES, 0), (PIECES, 12)])
def test_a_fetch_that_takes_too_long_is_given_up_and_what_came_is_used(monkeypatch, piece, reused):
    """The time is enough for three pieces of a block, and not for all of the prompt at once."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece)
    (*_, later), outcome = run(busy_then([1] * 40), eager("gateway.stall_seconds=2.7"))
    assert later.started == pytest.approx(later.arrival + 0.09)
    assert later.reused == reused
    assert moved(outcome)[1] == reused * 2


def test_what_a_replica_learns_decides(monkeypatch):
    """Prefill takes 3 ms a token here, more than it was told; so it fetches, once it has computed prompts itself."""
    monkeypatch.setattr(transfer, "HALF_LIFE", 1.0)
    monkeypatch.setattr(transfer, "TOKEN_SECONDS", 0.000001)
    first, busy = record(0.0, [1] * 160, name="first"), record(2.0, [1] * 4, output=1400, name="busy")
    lengths = [100, 800, 200, 600, 150, 700]
    own = [record(5.0 + 3 * n, [5 + n] * tokens, name=f"own {n}") for n, tokens in enumerate(lengths)]
    later = record(30.0, [1] * 160, name="later")
    for records, fetches in (([first, busy, later], 0), ([first, busy, *own, later], 1)):
        (*_, job), outcome = run(records, eager("routing.transfer=true"))
        assert job.replica == "replica-1"
        assert outcome.moved.fetches == fetches


def test_a_fetched_prefix_is_billed_as_a_read_as_on_its_donor():
    tokens = [1] * 38
    first = record(0.0, tokens, ends=[38], ttls=["5m"], name="first")
    busy = record(2.0, [1] * 4, output=500, name="busy")
    later = record(4.0, tokens, ends=[38], ttls=["5m"], name="later")
    (_, _, job), outcome = run([first, busy, later], eager())
    assert job.replica == "replica-1"
    assert (job.reused, job.hit, job.read) == (37, 38, 38)
    assert outcome.moved.fetched_bytes == 2 * 38  # with the tail before the breakpoint


def test_column_sums_come_with_the_blocks_that_need_them():
    first = record(0.0, [1] * 40, policy="h2o@6", name="first")
    busy = record(2.0, [1] * 4, output=500, name="busy")
    later = record(4.0, [1] * 40 + [2] * 8, policy="h2o@6", name="later")
    (_, _, job), outcome = run([first, busy, later], eager())
    assert (job.replica, job.reused) == ("replica-1", 40)
    assert outcome.moved.fetched_bytes > 80


def test_a_donor_that_dies_lends_nothing_more(monkeypatch):
    """After the first piece; what came by then is used."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", PIECES)
    failure = "simulator.failures=[{at: 4.075, replica: 0}]"
    jobs, outcome = run(busy_then([1] * 40), eager(failure))
    assert jobs[2].reused == 4
    assert moved(outcome)[:2] == (1, 8)
    assert jobs[1].resumptions == 1


def test_a_fetch_whose_donor_dies_says_nothing_of_the_next():
    """Do as a live replica, where such a fetch has failed."""

    def learned(*failure):
        settings = eager(*failure)
        jobs, lifetimes = prepare(busy_then([1] * 40), settings, Variant())
        size, levels = kv_shape(settings).token_bytes, Levels()
        stores = Stores(settings, lifetimes, size, jobs.block_size, laid_out(jobs), levels)
        kinds = {"": ReplicaKind(resolved(settings), stores, EXACT, None)}
        cluster = Cluster(jobs, settings, kinds, levels, True, False, 0, lambda arrived: None)
        cluster.run()
        return cluster._fleets[""].transfers["replica-1"]._times.fetch

    guessed = transfer.TransferTimes.of(transfer.TransferTerms.of(eager())).fetch
    assert learned() != guessed
    assert learned("simulator.failures=[{at: 4.075, replica: 0}]") == guessed


def test_a_replica_that_dies_while_it_fetches_loses_no_request():
    failure = "simulator.failures=[{at: 4.01, replica: 1, seconds: 0}]"
    jobs, _ = run(busy_then([1] * 40), eager(failure))
    assert (jobs[2].retries, jobs[2].replica) == (1, "replica-0")


SHRINK = (
    "cluster.autoscaling={max_replicas: 2, target_ongoing_requests: 8, upscale_delay_seconds: 0, "
    "downscale_delay_seconds: 0}"
)


@pytest.mark.parametrize(
    ("flags", "piece", "reused", "handed"),
    [
        ((), transfer.PIECE_BYTES, 39, 80),
        (("cluster.drain_seconds=0",), transfer.PIECE_BYTES, 0, 0),
        (("gateway.stall_seconds=3",), transfer.PIECE_BYTES, 0, 0),  # 0.1 s, and the offer takes 0.14
        (("gateway.stall_seconds=3",), 24, 39, 80),
        (("cluster.drain_seconds=0.6",), 24, 24, 48),  # 0.2 s: two pieces
    ],
)
def test_a_replica_that_is_stopped_leaves_its_blocks_to_the_others(monkeypatch, flags, piece, reused, handed):
    """Two prompts, one on each replica; at 10 s the second one goes."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece)
    records = [
        record(0.0, [1] * 40, name="first"),
        record(0.0, [2] * 40, name="second"),
        record(20.0, [2] * 40, output=500, name="second again"),
    ]
    jobs, outcome = run(records, eager(SHRINK, *flags))
    assert [job.replica for job in jobs] == ["replica-0", "replica-1", "replica-0"]
    assert jobs[2].reused == reused
    assert outcome.moved.handed_bytes == handed
    assert outcome.alive.value == 1


def test_a_replica_that_is_stopped_leaves_its_blocks_though_an_answer_outlasts_the_drain():
    """Answer the second prompt by the first replica from 13 s on, which has got its blocks and computes none again."""
    records = [
        record(0.0, [1] * 40, output=2000, name="first"),
        record(0.0, [2] * 40, output=2000, name="second"),
    ]
    jobs, outcome = run(records, eager(SHRINK, "cluster.drain_seconds=3"))
    assert [(job.replica, job.resumptions) for job in jobs] == [("replica-0", 0), ("replica-0", 1)]
    cold, _ = run(records, eager(SHRINK, "cluster.drain_seconds=3", "prefix_cache.enabled=false"))
    assert jobs[1].finished < cold[1].finished
    assert outcome.moved.handed_bytes == 80
    assert outcome.alive.value == 1
    assert outcome.slots.value == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6), st.integers(1, 40))
def test_pieces_have_all_entries_once_and_in_order(shapes, most):
    parts = [
        ChainSlice([entry(f"{number} {at}", 1 + at % 4) for at in range(first + count)], first, first + count)
        for number, (first, count) in enumerate(shapes)
    ]
    pieces = pieces_of(parts, most)
    inside = [[one for part in piece for one in part.chain[part.first : part.last]] for piece in pieces]
    assert [one for piece in inside for one in piece] == [
        one for part in parts for one in part.chain[part.first : part.last]
    ]
    for piece, following in zip(inside, [*inside, None][1:], strict=True):
        nbytes = sum(one.size for one in piece)
        assert nbytes <= most or len(piece) == 1
        assert following is None or nbytes + following[0].size > most

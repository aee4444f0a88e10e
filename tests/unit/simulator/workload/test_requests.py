"""Traces of other services as requests, in an open and in a closed loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, config
from tests.unit.simulator.published import published
from warmkv.simulator import traces
from warmkv.simulator.steps.costs import StepCost
from warmkv.simulator.studies import cachesim
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.traces import TraceError
from warmkv.simulator.traces.columns import Builder, Row
from warmkv.simulator.workload.requests import FollowUp, of_trace, turns

BLOCK = 4
INSTANT = StepCost(0.0, 0.0, 0.0)


def trace_of(*rows, size=BLOCK):
    """A trace of (arrival, blocks, tokens, output, session, think)."""
    builder = Builder("test")
    for at, blocks, tokens, output, session, think in rows:
        builder.add(Row(at, tokens, output, blocks, size, session, None, think))
    return builder.build()


def replayed(trace, settings, cost=EXACT, variant=Variant(), **how):
    requests = of_trace(trace, settings, **how)
    return run(requests.records, settings, variant, cost, turns=requests.turns)


def test_full_blocks_get_keys_and_a_partial_one_does_not():
    trace = trace_of((0, [7, 8], 8, 1, "a", 0), (1, [7, 8, 9], 10, 1, "a", 0), (2, [0], 4, 1, "b", 0))
    first, second, third = of_trace(trace, config()).records
    assert first.hashes == second.hashes
    assert len(set(first.hashes)) == 2
    assert third.hashes[0] not in first.hashes
    assert {record.block_size for record in (first, second, third)} == {BLOCK}


def test_blocks_are_shared_within_their_scope_only():
    trace = trace_of((0, [7], 5, 1, "a", 0), (100, [7], 5, 1, "b", 0), (200, [7], 5, 1, "b", 0))
    for scope, found in (("global", [0, 1, 1]), ("session", [0, 0, 1])):
        done = replayed(trace, config(), scope=scope)
        assert [job.blocks_found for job in done.jobs] == found
    with pytest.raises(TraceError, match="does not tell the tenant"):
        of_trace(trace, config(), scope="tenant")


def test_a_trace_without_blocks_finds_nothing_and_has_the_configured_block_size():
    trace = trace_of((0, (), 50, 2, None, 0), (9, (), 50, 2, None, 0), size=0)
    done = replayed(trace, config("prefix_cache.block_size=16"))
    assert [job.record.block_size for job in done.jobs] == [16, 16]
    assert (done.result.reused_tokens, done.result.prompt_tokens) == (0, 100)


def test_numbers_that_stand_for_no_prefix_are_refused():
    with pytest.raises(TraceError, match="the same block twice"):
        of_trace(trace_of((0, [7, 7], 8, 1, "a", 0)), config())


SESSIONS = (
    (0.0, [1], 4, 3, "a", 0.0),
    (0.5, [2], 4, 3, "b", 0.0),
    (1.0, [1, 3], 8, 3, "a", 2.0),
    (2.0, [2, 4], 8, 3, "b", 0.0),
    (3.0, [1, 3, 5], 12, 3, "a", 16.0),
)


def test_every_turn_but_the_first_waits_for_the_one_before_it():
    assert turns(trace_of(*SESSIONS)) == {2: FollowUp(0, 2.0), 3: FollowUp(1, 0.0), 4: FollowUp(2, 16.0)}
    assert turns(trace_of((0, [1], 4, 3, "a", 0), (1, [1], 4, 3, "a", 0))) == {}  # no think times at all


def test_a_closed_loop_waits_for_answers_and_an_open_one_does_not():
    slow = StepCost(1.0, 0.0, 0.0)
    closed = replayed(trace_of(*SESSIONS), config(), slow).jobs
    for previous, number, think in ((0, 2, 2.0), (1, 3, 0.0), (2, 4, 16.0)):
        assert closed[number].arrival == closed[previous].finished + think
    recorded = replayed(trace_of(*SESSIONS), config(), slow, open_loop=True).jobs
    assert [job.arrival for job in recorded] == [0.0, 0.5, 1.0, 2.0, 3.0]


def test_a_turn_whose_predecessor_was_refused_comes_all_the_same():
    long = (0.0, [1, 2, 3], 12, 5, "a", 0.0)
    jobs = replayed(trace_of(long, (1.0, [1], 4, 3, "a", 5.0)), config("engine.max_context=16")).jobs
    assert [bool(job.replica) for job in jobs] == [False, True]
    assert jobs[1].arrival == 5.0


@st.composite
def sessions(draw):
    """Rows over a small tree of prompts, with think times of a few sessions."""
    rows, now = [], 0.0
    for _ in range(draw(st.integers(0, 12))):
        now += draw(st.sampled_from([0.0, 0.0, 2**-7, 0.25, 1.0, 8.0]))
        branch, length = draw(st.integers(0, 2)), draw(st.integers(0, 6))
        shared = draw(st.integers(0, length))
        blocks = [100 + i if i < shared else 200 + 100 * shared + 10 * branch + i for i in range(length)]
        tokens = length * BLOCK + draw(st.integers(0 if blocks else 1, BLOCK - 1))
        think = draw(st.sampled_from([0.0, 0.5, 4.0]))
        rows.append((now, blocks, tokens, draw(st.integers(0, 20)), draw(st.sampled_from("ab")), think))
    return rows


FLAGS = st.sampled_from(
    [
        (),
        ("cluster.replicas=3", "engine.max_slots=2"),
        ("engine.kv_bytes=60B", "prefix_cache.memory_bytes=40B", "prefix_cache.host.memory_bytes=80B"),
        ("engine.max_slots=1", "engine.max_queue=1"),
    ]
)


@given(sessions(), FLAGS)
def test_a_closed_loop_conserves_requests_and_runs_forward(rows, flags):
    settings = config(*flags)
    requests = of_trace(trace_of(*rows), settings)
    done = run(requests.records, settings, Variant(), EXACT, turns=requests.turns)
    again = run(requests.records, settings, Variant(), EXACT, turns=requests.turns)
    assert done.result == again.result
    assert [job.record.id for job in done.jobs] == [str(number) for number in range(len(rows))]
    served = [job for job in done.jobs if job.replica]
    assert len(served) + done.result.refused == len(rows)
    assert sum(usage.prompt for usage in done.usages) == sum(job.record.input_tokens for job in served)
    billed = done.result.usage
    parts = [(usage.input, usage.read, usage.output) for usage in done.usages]
    assert (billed.input, billed.read, billed.output) == tuple(map(sum, zip(*parts, strict=True))) or not parts
    for number, job in enumerate(done.jobs):
        if job.replica:
            assert job.arrival <= job.started < job.first <= job.finished <= done.outcome.end
        turn = requests.turns.get(number)
        if turn is not None:
            before = done.jobs[turn.previous]
            assert job.arrival == (before.finished if before.replica else before.arrival) + turn.think
    assert done.outcome.slots.value == 0


@given(sessions(), st.integers(0, 12), st.sampled_from([1.51, 7.53, 1e9]))
def test_instant_requests_find_what_a_pass_over_the_trace_finds(rows, room, ttl):
    """The same hits by way of the cluster, its replica and the live block rules, as by stack distances."""
    full = [(at, blocks, len(blocks) * BLOCK, output, session, 0.0) for at, blocks, _, output, session, _ in rows]
    trace = trace_of(*[row for row in full if row[1]])
    expected = cachesim.lru(trace, unit="blocks", tail_first=True).hits(room, ttl).blocks
    settings = config(f"prefix_cache.memory_bytes={room * BLOCK * 2}", "engine.max_slots=1")  # one after the other
    done = replayed(trace, settings, INSTANT, Variant(ttl=ttl))
    assert sum(job.blocks_found for job in done.jobs) == expected


def test_the_published_conversation_trace_has_its_ideal_hits():
    """Serve at once, one by one, from one cache without limits; full blocks only, as live replicas keep."""
    trace = traces.read(published("mooncake_conversation.jsonl")).take(np.arange(1000))
    settings = config("prefix_cache.memory_bytes=1TiB", "engine.kv_bytes=1TiB", "engine.max_slots=1")
    done = replayed(trace, settings, INSTANT, Variant(ttl=1e9))
    seen: set[int] = set()
    found = 0
    for number in range(len(trace)):
        chain = trace.chain(number).tolist()[: int(trace.input_tokens[number]) // trace.block_size]
        found += next((at for at, block in enumerate(chain) if block not in seen), len(chain))
        seen.update(chain)
    assert sum(job.blocks_found for job in done.jobs) == found > 0
    assert done.result.refused == 0

"""A mixed token budget against vLLM's rules stepped token by token, with lists and nothing else."""

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT
from warmkv.simulator.engine.formation import NEVER
from warmkv.simulator.engine.limits import Limits
from warmkv.simulator.latency.server import ServedRequest, Server
from warmkv.simulator.steps.costs import StepCost

LIMITS = [
    Limits(8, 64),
    Limits(1, 5),
    Limits(3, 3),
    Limits(4, 16, kv_tokens=60, kv_block=4),
    Limits(6, 7, kv_tokens=72, kv_block=1),
    Limits(64, 512, kv_tokens=96, kv_block=16),
]
requests = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 2**-7, 2**-5, 0.25, 4.0]), st.integers(1, 30), st.integers(1, 30)),
    min_size=1,
    max_size=14,
)


def sequences(rows, cached=False):
    arrival, made = 0.0, []
    for gap, prompt, output in rows:
        arrival += gap
        made.append(ServedRequest(arrival, prompt, output, min(prompt - 1, output) if cached else 0))
    return made


def times(made):
    return [(s.scheduled, s.first, s.finished, s.num_preemptions) for s in made]


def serve(made, limits, cost=EXACT, **options):
    Server(cost, limits, **options).serve(made)
    return times(made)


def obvious(made, limits, cost=EXACT):
    """vLLM's rules read aloud: running sequences in order of admission, then waiting ones, within the budget."""
    coming, waiting, running, now = list(made), [], [], 0.0
    computed, drawn, blocks = defaultdict(int), defaultdict(int), defaultdict(int)
    times = {id(s): [NEVER, NEVER, NEVER, 0] for s in made}
    size = limits.kv_block
    free = math.inf if limits.kv_tokens is None else limits.kv_tokens // size

    def grab(key, tokens):
        nonlocal free
        more = -(-tokens // size) - blocks[key]
        if more > free:
            return False
        free, blocks[key] = free - more, blocks[key] + more
        return True

    def release(key):
        nonlocal free
        free, blocks[key] = free + blocks[key], 0

    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            waiting.append(coming.pop(0))
        budget, work, preempted = limits.max_batched_tokens, {}, False
        for one in list(running):
            if one not in running:
                continue
            key = id(one)
            chunk = min(budget, one.prompt + drawn[key] - computed[key])
            while not grab(key, computed[key] + chunk):
                victim = running.pop()
                release(id(victim))
                computed[id(victim)] = 0
                times[id(victim)][3] += 1
                waiting.insert(0, victim)
                preempted = True
                if victim is one:
                    break
            if one in running:
                work[key], budget = (one, chunk), budget - chunk
        while waiting and not preempted and budget and len(running) < limits.max_num_seqs:
            one = waiting[0]
            key = id(one)
            start = one.cached if times[key][0] == NEVER else 0
            target = one.prompt + drawn[key]
            if -(-target // size) > free:
                break
            running.append(waiting.pop(0))
            if times[key][0] == NEVER:
                times[key][0] = now
            computed[key] = start
            chunk = min(budget, target - start)
            assert grab(key, start + chunk)
            work[key], budget = (one, chunk), budget - chunk
        for key, (_, chunk) in work.items():
            computed[key] += chunk
        now += cost.seconds(sum(chunk for _, chunk in work.values()), sum(computed[key] for key in work))
        for key, (one, _) in work.items():
            if computed[key] == one.prompt + drawn[key]:
                drawn[key] += 1
                if times[key][1] == NEVER:
                    times[key][1] = now
                if drawn[key] == one.output:
                    times[key][2] = now
                    running.remove(one)
                    release(key)
    return [tuple(times[id(s)]) for s in made]


@given(requests, st.sampled_from(LIMITS), st.booleans())
def test_the_server_equals_an_obvious_one(rows, limits, cached):
    made = sequences(rows, cached)
    expected = obvious(made, limits)
    assert serve(made, limits) == expected


@given(requests, st.sampled_from(LIMITS))
def test_fast_forward_equals_stepping(rows, limits):
    assert serve(sequences(rows), limits) == serve(sequences(rows), limits, fast_forward=False)


@given(requests, st.sampled_from(LIMITS))
def test_fast_forward_equals_stepping_up_to_rounding(rows, limits):
    cost = StepCost(0.0131, 3.8e-5, 7.5e-8, 1e-9)
    fast, slow = (serve(sequences(rows), limits, cost, fast_forward=fast) for fast in (True, False))
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


@given(requests, st.sampled_from(LIMITS))
def test_all_are_served_in_time_and_nothing_is_left(rows, limits):
    made = sequences(rows)
    server = Server(EXACT, limits)
    server.serve(made)
    for one in made:
        assert one.arrival <= one.noted <= one.scheduled < one.first <= one.finished
        assert (one.first == one.finished) == (one.output == 1)
    engine = server.engine
    assert (engine.running, engine.batch.size) == ([], 0)
    if engine._blocks is not None:
        assert (engine._blocks.free, engine._blocks._growing) == (limits.blocks, 0)
        assert not any(engine._blocks._phases)


@given(requests, st.sampled_from(LIMITS))
def test_work_is_what_every_step_computes_and_reads(rows, limits):
    """All the work at the end is tokens and contexts of all steps, whether stepped or not."""
    fast, slow = sequences(rows), sequences(rows)
    for made, forward in ((fast, True), (slow, False)):
        Server(EXACT, limits, fast_forward=forward).serve(made)
    for ours, theirs in zip(fast, slow, strict=True):
        for name in ("noted", "work_before", "work_first", "work_finished"):
            assert getattr(ours, name) == getattr(theirs, name)
    if not any(one.num_preemptions for one in fast):
        _, tokens, _ = max(one.work_finished for one in fast)
        assert tokens == sum(one.prompt + one.output - 1 for one in fast)


def test_one_request_by_hand():
    """20 prompt tokens in steps of 8, then 4 decode steps, each over one token more."""
    (times,) = serve([ServedRequest(5.0, 20, 5)], Limits(1, 8))
    a, b, c = EXACT.a, EXACT.b, EXACT.c
    first = 5.0 + 3 * a + 20 * b + c * (8 + 16 + 20)
    assert times == (5.0, first, first + 4 * (a + b) + c * (21 + 22 + 23 + 24), 0)


def test_the_last_admitted_gives_way_and_computes_anew():
    """Two prompts of 8 fill all but one of 5 blocks of 4; growing, both need a block in the same step."""
    made = [ServedRequest(0.0, 8, 5), ServedRequest(0.0, 8, 5)]
    (_, _, first_end, first_lost), (_, first, last_end, lost) = serve(made, Limits(2, 16, kv_tokens=20, kv_block=4))
    assert (first_lost, lost) == (0, 1)
    assert last_end > first_end > first
    assert made[1].num_preemptions == 1


def test_limits_under_which_nothing_runs_are_refused():
    for wrong in ((0, 8), (4, 3), (1, 8, 4, 16), (1, 8, 64, 0)):
        with pytest.raises(ValueError, match=r"max_num_seqs|max_batched_tokens|kv_tokens"):
            Limits(*wrong)
    limits = Limits(4, 16, kv_tokens=32, kv_block=16)
    with pytest.raises(ValueError, match="20 \\+ 14 tokens do not fit into 32 tokens of KV"):
        serve([ServedRequest(0.0, 20, 14)], limits)
    for wrong in ((0.0, 0, 5), (0.0, 5, 0), (0.0, 5, 5, 5)):
        with pytest.raises(ValueError, match="a request needs a prompt"):
            serve([ServedRequest(*wrong)], limits)
    serve([ServedRequest(0.0, 20, 13)], limits)


def test_steps_that_cost_nothing_take_no_time():
    assert serve(sequences([(1.0, 5, 9), (1.0, 30, 3)]), Limits(2, 4), StepCost(0, 0, 0)) == [
        (1, 1, 1, 0),
        (2, 2, 2, 0),
    ]

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, TWO_ROOFS, config, logs, record, run, uniform
from warmkv.policies.batching import PASSES, split
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.steps.costs import StepCost, batch_seconds
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant

LIMITS = st.sampled_from(
    [
        (),
        ("engine.max_slots=1",),
        ("engine.kv_bytes=200B",),
        ("engine.step_tokens=4", "prefix_cache.memory_bytes=60B"),
        ("prefix_cache.memory_bytes=60B", "prefix_cache.host.memory_bytes=120B", "prefix_cache.eviction=cost"),
        ("cluster.replicas=3", "engine.max_slots=2"),
        ("cluster.replicas=2", "engine.max_queue=1", "routing.policy=power_of_two"),
        ("cluster.replicas=3", "engine.max_slots=1", "routing.policy=round_robin"),
        ("cluster.replicas=2", "routing.policy=least_loaded"),
        ("cluster.replicas=2", "routing.policy=sticky_session"),
    ]
)


def times(jobs):
    return [(job.replica, job.started, job.first, job.finished, job.reused, job.hit) for job in jobs]


COSTS = st.sampled_from([EXACT, uniform(TWO_ROOFS)])


@given(logs(), LIMITS, COSTS)
def test_fast_forward_equals_stepping(records, flags, cost):
    fast, fast_outcome = run(records, config(*flags), cost=cost)
    slow, slow_outcome = run(records, config(*flags), cost=cost, fast_forward=False)
    assert times(fast) == times(slow)
    assert (fast_outcome.slots.peak, fast_outcome.stored.peak) == (slow_outcome.slots.peak, slow_outcome.stored.peak)
    assert fast_outcome.end == slow_outcome.end


def test_fast_forward_equals_stepping_up_to_rounding():
    chance = random.Random(5)
    records: list[RequestRecord] = []
    for _ in range(200):
        arrival = (records[-1].arrival if records else 0.0) + chance.expovariate(3)
        prompt = [chance.randrange(3)] * chance.randrange(1, 100)
        policy = chance.choice(["full", "snapkv@0.3", "streaming_llm@16"])
        records.append(record(arrival, prompt, chance.randrange(60), policy=policy))
    cost = StepCost(0.0037, 0.00011, 1.3e-7)
    fast, _ = run(records, config("cluster.replicas=2"), cost=cost)
    slow, _ = run(records, config("cluster.replicas=2"), cost=cost, fast_forward=False)
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.replica == theirs.replica
        assert (ours.first, ours.finished) == pytest.approx((theirs.first, theirs.finished), rel=1e-9)


def obvious(records, settings, cost):
    """One replica without a prefix cache, a step at a time; (start, first, end) of every request in order."""
    engine = settings.engine
    jobs, _ = prepare(records, settings, Variant())
    now, waiting, prompts, decoding = 0.0, [], [], []
    coming, times = list(enumerate(jobs)), {}

    def held():
        slots = [job for _, job, *_ in [*prompts, *decoding]]
        return sum(job.slot_bytes for job in slots) + sum(job.workspace_bytes for _, job, _ in prompts)

    def gets(budget, tokens):
        return split(budget, [*(job.prompt - done for _, job, done in prompts), tokens])[-1] > 0

    def admitted(budget):
        passed = []
        for member in waiting[:PASSES]:
            _, job, _ = member
            fits = held() + job.slot_bytes + job.workspace_bytes <= engine.kv_bytes
            if fits and gets(budget, job.prompt) and len(prompts) + len(decoding) < engine.max_slots:
                for other in passed:
                    other[2] += 1
                return member
            if member[2] == PASSES:
                return None
            passed.append(member)
        return None

    while coming or waiting or prompts or decoding:
        if not (waiting or prompts or decoding):
            now = max(now, coming[0][1].arrival)
        while coming and coming[0][1].arrival <= now:
            waiting.append([*coming.pop(0), 0])
        budget = engine.step_tokens - len(decoding)
        while member := admitted(budget):
            waiting.remove(member)
            number, job, _ = member
            prompts.append([number, job, 0])
            times[number] = [now]
        shares = split(budget, [job.prompt - done for _, job, done in prompts])
        loads = []
        if decoding:
            for member in decoding:
                member[2] = min(member[2] + 1, member[1].capacity)
            loads.append((cost, len(decoding), sum(entries for _, _, entries, _ in decoding)))
        for member, tokens in zip(prompts, shares, strict=True):
            member[2] += tokens
            loads += [(cost, tokens, member[2])] if tokens else []
        now += batch_seconds(loads)
        for member in decoding:
            member[3] -= 1
            if not member[3]:
                times[member[0]].append(now)
        decoding = [member for member in decoding if member[3]]
        for number, job, done in prompts:
            if done == job.prompt:
                times[number].append(now)
                if job.record.output_tokens > 1:
                    decoding.append([number, job, job.kept, job.record.output_tokens - 1])
                else:
                    times[number].append(now)
        prompts = [member for member in prompts if member[2] < member[1].prompt]
    return [tuple(times[number]) for number in range(len(jobs))]


@given(
    logs(),
    st.sampled_from([(), ("engine.max_slots=2",), ("engine.kv_bytes=300B",), ("engine.step_tokens=4",)]),
    st.sampled_from([EXACT, TWO_ROOFS]),
)
def test_the_replica_equals_an_obvious_one(records, flags, cost):
    settings = config("prefix_cache.enabled=false", *flags)
    jobs, _ = run(records, settings, cost=uniform(cost))
    offset = records[0].arrival
    records = [replace(record, arrival=record.arrival - offset) for record in records]
    assert [(job.started, job.first, job.finished) for job in jobs] == obvious(records, settings, cost)


@given(logs(), LIMITS)
def test_every_request_is_served_once_or_refused_and_time_runs_forward(records, flags):
    jobs, outcome = run(records, config(*flags))
    assert [job.record for job in jobs] == records
    for job in jobs:
        if not job.replica:
            assert (job.started, job.first, job.finished) == (-1, -1, -1)
            continue
        assert job.arrival <= job.started < job.first <= job.finished <= outcome.end
        assert (job.first == job.finished) == (job.record.output_tokens <= 1)
        assert 0 <= job.reused <= job.record.input_tokens - job.recomputed
        assert job.blocks_found <= len(job.record.hashes)
    if not any(flag.startswith("engine.kv_bytes") for flag in flags):
        assert all(job.replica for job in jobs)


@given(logs(), LIMITS)
def test_bytes_and_slots_stay_within_their_limits(records, flags):
    settings = config(*flags)
    jobs, outcome = run(records, settings)
    assert outcome.slots.value == 0
    assert outcome.slots.peak <= settings.engine.kv_bytes * settings.cluster.replicas
    limit = settings.prefix_cache.memory_bytes + settings.prefix_cache.host.memory_bytes
    assert outcome.stored.peak <= limit * settings.cluster.replicas
    for name in {job.replica for job in jobs if job.replica}:
        here = [job for job in jobs if job.replica == name]
        for moment in [job.started for job in here]:
            running = [job for job in here if job.started <= moment < job.finished]
            held = sum(job.slot_bytes + (job.workspace_bytes if moment < job.first else 0) for job in running)
            assert len(running) <= settings.engine.max_slots
            assert held <= settings.engine.kv_bytes


@given(logs(), LIMITS)
def test_the_same_log_gives_the_same_outcome(records, flags):
    assert times(run(records, config(*flags))[0]) == times(run(records, config(*flags))[0])


@given(logs(), st.integers(0, 20).map(lambda quarter: quarter / 4))
def test_only_differences_of_arrivals_count(records, offset):
    moved = [replace(record, arrival=record.arrival + offset) for record in records]
    assert times(run(records, config())[0]) == times(run(moved, config())[0])


def test_one_request_by_hand():
    """20 prompt tokens in chunks of 8, then 4 decode steps, each over one entry more."""
    (job,), outcome = run([record(5.0, [1] * 20, output=5)], config())
    a, b, c = EXACT.a, EXACT.b, EXACT.c
    prefill = 3 * a + b * 20 + c * (8 + 16 + 20)
    decode = 4 * (a + b) + c * (21 + 22 + 23 + 24)
    assert (job.started, job.first, job.finished) == (0.0, prefill, prefill + decode)
    assert outcome.end == job.finished
    assert outcome.slots.peak == 32 * 2  # 24 entries, in the size class of 32
    assert outcome.stored.peak == 20 * 2


def test_a_second_request_is_chunked_beside_decode_steps_by_hand():
    first, second = record(0.0, [1] * 8, output=9), record(0.0, [2] * 16, output=1)
    jobs, _ = run([first, second], config())
    a, b, c = EXACT.a, EXACT.b, EXACT.c
    prefill = a + 8 * b + 8 * c
    # The first prompt, then in each step of eight tokens one that is decoded and seven of the second prompt.
    steps = [(8, 9 + 7), (8, 10 + 14), (3, 11 + 16)]
    assert jobs[0].first == jobs[1].started == prefill
    assert jobs[1].first == prefill + sum(a + tokens * b + context * c for tokens, context in steps)


def test_a_short_prompt_is_computed_before_the_rest_of_a_long_one_by_hand():
    long, short = record(0.0, [1] * 800, output=1), record(2**-5, [2] * 4, output=1)
    jobs, _ = run([long, short], config())
    a, b, c = EXACT.a, EXACT.b, EXACT.c
    steps = [(8, 8), (8, 16), (8, 20 + 4)]  # it comes during the second, and takes half of the third
    assert jobs[1].first == sum(a + tokens * b + context * c for tokens, context in steps)
    assert jobs[1].first < jobs[0].first


def test_identical_prompts_that_come_together_are_computed_once():
    jobs, _ = run([record(0.0, [1] * 40, name=str(number)) for number in range(4)], config("engine.step_tokens=100"))
    assert [job.reused for job in jobs] == [0, 39, 39, 39]
    jobs, _ = run(
        [record(0.0, [1] * 40, name=str(number)) for number in range(4)],
        config("engine.step_tokens=160", "prefix_cache.enabled=false"),
    )
    assert len({job.first for job in jobs}) == 1  # where nothing is kept nobody waits for it


@pytest.mark.parametrize("flag", ["prefix_cache.automatic=false", "prefix_cache.memory_bytes=0B"])
def test_nobody_waits_for_a_prompt_that_leaves_nothing(flag):
    records = [record(0.0, [1] * 40, name=str(number)) for number in range(4)]
    jobs, _ = run(records, config("engine.step_tokens=160", flag))
    assert len({job.first for job in jobs}) == 1


def test_what_a_breakpoint_stores_is_waited_for():
    prompts = [[1] * 40 + [2 + number] * 8 for number in range(4)]
    records = [record(0.0, tokens, ends=[40], ttls=["5m"], name=str(at)) for at, tokens in enumerate(prompts)]
    jobs, _ = run(records, config("engine.step_tokens=400", "prefix_cache.automatic=false"))
    assert [job.reused for job in jobs] == [0, 40, 40, 40]


@pytest.mark.parametrize(
    ("first", "second", "waits"), [("full", "h2o@20", False), ("h2o@20", "h2o@20", True), ("h2o@20", "full", True)]
)
def test_who_needs_column_sums_waits_for_a_prompt_that_leaves_them(first, second, waits):
    records = [record(0.0, [1] * 41, policy=policy, name=str(at)) for at, policy in enumerate((first, second))]
    jobs, _ = run(records, config("engine.step_tokens=100"))
    assert (jobs[1].started > 0) == waits
    assert jobs[1].reused == (40 if waits else 0)


def test_a_short_prompt_does_not_wait_for_a_long_one_for_one_block():
    jobs, _ = run([record(0.0, [1] * 4 + [2] * 400, name="long"), record(0.0, [1] * 4 + [3] * 16)], config())
    long, short = jobs
    assert short.started == 0
    assert short.first < long.first


def test_an_arrival_joins_at_the_next_step():
    jobs, _ = run([record(0.0, [1] * 4, output=1000), record(1.0, [2] * 4, output=1)], config())
    longest_step = EXACT.seconds(1, 1004)
    assert 1.0 <= jobs[1].started <= 1.0 + longest_step


def test_a_full_ring_grows_no_more():
    ring, whole = (
        run([record(0.0, [1] * 64, output=500, policy=policy)], config())[0][0]
        for policy in ("streaming_llm@8", "full")
    )
    assert ring.slot_bytes == 16 * 2 + 4  # the smallest size class, and the keys of 4 sinks
    assert whole.slot_bytes == 640 * 2  # 563 entries
    assert ring.finished - ring.first == 499 * EXACT.seconds(1, 8)
    assert whole.finished - whole.first > ring.finished - ring.first


def test_simultaneous_requests_are_all_served():
    jobs, _ = run([record(3.0, [n] * 9, output=3) for n in range(50)], config("cluster.replicas=2"))
    assert all(job.replica for job in jobs)
    assert {job.replica for job in jobs} == {"replica-0", "replica-1"}


def test_what_never_fits_is_refused():
    jobs, _ = run([record(0.0, [1] * 100), record(0.0, [2] * 10)], config("engine.kv_bytes=50B"))
    assert [bool(job.replica) for job in jobs] == [False, True]
    jobs, _ = run([record(0.0, [1] * 60, output=5)], config("engine.max_context=64"))
    assert not jobs[0].replica


@pytest.mark.parametrize("more", [(), ("cluster.autoscaling={max_replicas: 1}",)])
def test_what_finds_all_replicas_full_waits_in_line_and_the_line_has_an_end(more):
    few = config("engine.max_queue=3", "engine.max_slots=1", *more)  # one runs, and three wait in the replica
    records = [record(0.0, [n] * 10, name=str(n)) for n in range(6)]
    jobs, _ = run(records[:5], few)
    assert all(job.replica for job in jobs)
    assert [job.submitted for job in jobs] == [0.0] * 4 + [jobs[0].finished]
    short = ("engine.max_queue=3", "engine.max_slots=1", "cluster.max_queued_requests=1", *more)
    jobs, outcome = run(records, config(*short))
    assert [bool(job.replica) for job in jobs] == [True] * 5 + [False]
    assert (jobs[5].too_large, outcome.slots.value) == (False, 0)
    jobs, _ = run(records, config(*short, "cluster.gateways=2"))
    assert all(job.replica for job in jobs)  # each gateway has a line


def test_who_waits_in_line_goes_to_the_first_replica_with_room_in_turn():
    flags = ("cluster.replicas=2", "engine.max_queue=1", "engine.max_slots=1", "prefix_cache.enabled=false")
    records = [record(0.0, [n] * (40 if n == 0 else 10), output=2, name=str(n)) for n in range(9)]
    jobs, _ = run(records, config(*flags))
    assert [job.submitted for job in jobs[:4]] == [0.0] * 4
    assert all(before.submitted <= after.submitted for before, after in pairwise(jobs))
    assert {job.submitted for job in jobs[4:]} <= {job.finished for job in jobs}
    placed = [replace(one, replica="a" if n % 3 else "b") for n, one in enumerate(records)]
    jobs, _ = run(placed, config(*flags), as_placed=True)
    assert [job.replica for job in jobs] == ["b", "a", "a"] * 3
    for name in "ab":
        here = [job for job in jobs if job.replica == name]
        assert [job.submitted for job in here] == [0.0, 0.0, *(job.finished for job in here[:-2])]


def test_a_conversation_returns_to_the_warm_replica():
    records = [record(float(n), [n % 4] * 40, output=2, name=str(n)) for n in range(40)]
    jobs, _ = run(records, config("cluster.replicas=4"))
    for topic in range(4):
        assert len({job.replica for job in jobs[topic::4]}) == 1
    assert all(job.reused == 39 for job in jobs[4:])


@pytest.mark.parametrize("policy", ["prefix_cost", "sticky_session"])
def test_routing_by_prefix_or_session_finds_what_others_miss(policy):
    records = [record(float(n), [n % 7] * 40, output=2, name=str(n)) for n in range(70)]

    def reused(name):
        jobs, _ = run(records, config("cluster.replicas=4", f"routing.policy={name}"))
        return sum(job.reused for job in jobs)

    assert reused(policy) == 63 * 39
    for other in ("power_of_two", "round_robin", "least_loaded"):
        assert reused(other) < reused(policy)


def test_what_is_stored_lives_as_long_as_was_said_then():
    """Change TTLs of a running service: what was stored before keeps its own."""
    times = [(0.0, 1), (200.0, 2), (550.0, 1), (560.0, 2), (1000.0, 1)]
    records = [record(at, [topic] * 40, name=str(at)) for at, topic in times]

    def reused(*later):
        jobs, _ = run(records, config(), later=later)
        return [job.reused for job in jobs]

    longer, shorter = (Lifetimes({"5m": ttl, "1h": 3600.0}, ttl, automatic=True) for ttl in (600.0, 100.0))
    assert reused() == [0, 0, 0, 0, 0]
    assert reused((100.0, longer)) == [0, 0, 0, 39, 39]
    assert reused((-1.0, longer)) == [0, 0, 39, 39, 39]
    assert reused((100.0, longer), (555.0, shorter)) == [0, 0, 0, 39, 39]
    assert reused((100.0, longer), (545.0, shorter)) == [0, 0, 0, 39, 0]


@pytest.mark.parametrize("policy", ["prefix_cost", "sticky_session"])
def test_a_session_that_requests_name_keeps_together(policy):
    """Route prompts that share nothing to replicas that keep nothing and have nothing to do."""
    names = [f"session-{n % 7}" for n in range(70)]
    records = [
        replace(record(100.0 * n, [n] * 40, output=2, name=str(n)), session=session) for n, session in enumerate(names)
    ]
    flags = ("cluster.replicas=4", f"routing.policy={policy}", "prefix_cache.enabled=false")
    jobs, _ = run(records, config(*flags))
    places = {(session, job.replica) for session, job in zip(names, jobs, strict=True)}
    assert len(places) == 7
    assert len({replica for _, replica in places}) > 1


EVERYTHING = (
    "cluster.gateways=2",
    "cluster.autoscaling={max_replicas: 3, upscale_delay_seconds: 0, downscale_delay_seconds: 0}",
    "simulator.index_delay=0.1",
    "simulator.failures=[{at: 0}, {at: 5, replica: 2}]",
)


@pytest.mark.parametrize("flags", [(), EVERYTHING])
def test_an_empty_cluster_ends_at_once(flags):
    jobs, outcome = run([], config(*flags))
    assert (len(jobs), outcome.end) == (0, 0.0)
    assert outcome.alive.mean(outcome.end) == 1


def test_one_request_and_everything_else_that_may_happen():
    (job,), outcome = run([record(7.0, [1] * 20, output=5)], config(*EVERYTHING))
    assert job.retries == 1
    assert job.replica == "replica-0.1"
    assert job.started == 5.0 + 30.0  # the failure is noticed, and another replica has started
    assert outcome.end == job.finished


def test_free_steps_take_no_time_and_end():
    jobs, _ = run([record(0.0, [1] * 9, output=9), record(1.0, [1] * 9)], config(), cost=StepCost(0, 0, 0))
    assert [job.finished for job in jobs] == [0.0, 1.0]


def test_host_memory_behind_a_small_device_tier_gives_more_hits():
    records = [record(10.0 * number, [number % 6] * 40, 2, name=str(number)) for number in range(30)]
    reused = []
    for room in ("0", "1MB"):
        jobs, _ = run(records, config("prefix_cache.memory_bytes=200B", f"prefix_cache.host.memory_bytes={room}"))
        reused.append(sum(job.reused for job in jobs))
    assert reused == [0, 24 * 39]

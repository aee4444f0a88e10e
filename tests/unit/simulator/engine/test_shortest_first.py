"""Steps behind long contexts, each with fewer tokens than the one before, as one event."""

import math
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import config, record, run, uniform
from warmkv.policies import batching
from warmkv.policies.batching import PASSES
from warmkv.policies.fair_queue import FairQueue
from warmkv.simulator.engine.batch import Load
from warmkv.simulator.engine.shortest_first import ShortestFirst
from warmkv.simulator.steps.costs import PhaseCosts, Roofline, StepCost, UniformCosts

# Powers of two, whose sums are exact. A token's attention to 16 keys takes as long as the rest of it.
DEEP = StepCost(2**-6, 2**-10, 2**-16, 2**-14)
ROOFS = Roofline((StepCost(2**-6, 2**-11, 0.0, 2**-15, -(2**-16)), StepCost(2**-5, 2**-10, 2**-12)))
COSTS = st.sampled_from(
    [uniform(DEEP), uniform(ROOFS), UniformCosts(PhaseCosts(ROOFS, ROOFS, StepCost(2**-7, 2**-12, 2**-13)), 2**-8)]
)
LIMITS = st.lists(
    st.sampled_from(
        [
            "engine.step_tokens=4",
            "engine.step_tokens=32",
            "engine.step_tokens=100",
            "engine.max_slots=2",
            "engine.max_slots=16",
            "engine.kv_bytes=2000B",
            "engine.max_queue=2",
            "prefix_cache.memory_bytes=300B",
            "prefix_cache.enabled=false",
            "cluster.replicas=2",
        ]
    ),
    max_size=4,
    unique_by=lambda flag: flag.partition("=")[0],
)
LOWER = ("prefix_cache.memory_bytes=300B", "prefix_cache.host.memory_bytes=2000B", "simulator.host_bandwidth=1024")
MORE = st.sampled_from(
    [
        (),
        LOWER,
        (*LOWER, "prefix_cache.disk.memory_bytes=4000B", "prefix_cache.disk.path=d", "simulator.disk_bandwidth=512"),
        ("simulator.failures=[{at: 0.75, replica: 0}]", "simulator.startup_seconds=0.5"),
    ]
)


@st.composite
def long_logs(draw):
    """Return requests with long prompts, many of which begin alike and arrive while others are computed."""
    records, arrival = [], 0.0
    for number in range(draw(st.integers(1, 12))):
        arrival += draw(st.sampled_from([0.0, 2**-7, 2**-4, 0.5, 4.0])) + draw(st.integers(0, 64)) / 1024
        tokens = [draw(st.integers(0, 1))] * draw(st.integers(1, 150)) + [2 + number] * draw(st.integers(0, 250))
        output, policy = draw(st.integers(0, 120)), draw(st.sampled_from(["full", "full", "snapkv@0.5"]))
        records.append(record(arrival, tokens, output, policy=policy, name=f"r{number}"))
    return records


def outcomes(jobs):
    return [
        (job.replica, job.started, job.first, job.finished, job.reused, job.retries, job.resumptions, job.passed)
        for job in jobs
    ]


@given(long_logs(), LIMITS, MORE, COSTS, st.sampled_from([2, PASSES]))
def test_fast_forward_behind_long_contexts_equals_stepping(records, limits, more, cost, passes):
    flags = [flag for flag in limits if not any(flag.partition("=")[0] == other.partition("=")[0] for other in more)]
    if "prefix_cache.enabled=false" in flags:
        flags.remove("prefix_cache.enabled=false")
        more = more if "failures" in str(more) else ("prefix_cache.enabled=false",)
    with patch.object(batching, "PASSES", passes):
        (fast, fast_outcome), (slow, slow_outcome) = (
            run(records, config(*flags, *more), cost=cost, fast_forward=forward) for forward in (True, False)
        )
    assert outcomes(fast) == outcomes(slow)
    assert (fast_outcome.slots.peak, fast_outcome.end) == (slow_outcome.slots.peak, slow_outcome.end)


def test_who_keeps_others_waiting_lets_them_pass_once_it_waits_for_a_prefix_itself():
    """Have the third prompt wait for the first from some step on, while that is computed beside the second."""
    prompts = [[0] * 150 + [2] * 230, [3] * 198, [0] * 150 + [4] * 50, [5] * 9, [6] * 9, [7] * 9]
    records = [record(0.0, tokens, name=str(at)) for at, tokens in enumerate(prompts)]
    limits = config("engine.step_tokens=32", "engine.max_slots=16")
    with patch.object(batching, "PASSES", 2):
        fast, slow = (run(records, limits, cost=uniform(DEEP), fast_forward=forward)[0] for forward in (True, False))
    assert outcomes(fast) == outcomes(slow)
    _, second, third, *_, last = fast
    assert 0 < last.started < second.first < third.started


@dataclass(eq=False)
class Request:
    """A request whose files take `reading` seconds, and what comes from host memory `copying`."""

    prompt: int
    output: int
    reading: float = 0.0
    copying: float = 0.0
    costs: PhaseCosts = field(default_factory=lambda: PhaseCosts(DEEP, DEEP))
    keys_per_token: float = DEEP.b / DEEP.d
    computed: int = 0
    passed: int = 0
    load: Load | None = None
    lead: float = 0.0
    slot_bytes: int = 1
    workspace_bytes: int = 1
    first: float = 0.0
    finished: float = 0.0

    @property
    def kept(self):
        return self.prompt // 2

    @property
    def capacity(self):
        return self.kept + self.output // 2


class Engine:
    """Own an engine, and note the times at which it is woken."""

    stores = False

    def __init__(self, fast, tokens=64, room=10):
        self.waiting, self.at, self.woken, self.stored = FairQueue(), 0.0, [], {}
        self.engine = ShortestFirst(self, self.waiting, self.wake, fast, step_tokens=tokens, max_slots=8, room=room)

    def wake(self, at):
        self.at = at

    def serve(self, arrivals):
        """Serve requests, each with the time at which it arrives; return the times of each."""
        coming = sorted(arrivals, key=lambda each: each[0])
        while coming or self.engine.running or self.waiting:
            if coming and (coming[0][0] <= self.at or not (self.engine.running or self.waiting)):
                now, request = coming.pop(0)
                if callable(request):
                    request(now)
                    continue
                self.waiting.push(request, "", 1.0)
                self.engine.arrived(request, now)
            else:
                self.woken.append(self.at)
                self.engine.resume(self.at)
        return [(request.first, request.finished) for _, request in arrivals if isinstance(request, Request)]

    def begin(self, request, now):
        request.load, request.lead = self.engine.batch.load_of(request.costs.decode), request.copying
        request.computed = self.stored.get(request, 0)
        return request.reading

    def stored_tokens(self, request, now):
        return self.stored.get(request, 0)

    def waits_for_prefix(self, request, computing, now, *, ever=False):
        raise AssertionError("nothing is stored")

    def prompt_computed(self, request, now):
        request.first = now

    def end(self, request, now):
        request.finished = now


REQUESTS = st.tuples(
    st.integers(1, 400), st.integers(0, 300), st.sampled_from([0.0, 0.0, 0.25]), st.sampled_from([0.0, 2**-5])
)
ARRIVALS = st.lists(st.tuples(st.integers(0, 256).map(lambda at: at / 64), REQUESTS), min_size=1, max_size=8)


# The last prompt gets its first token in a run of steps that began without it.
LATE = [(0.0, (8, 0, 0.0, 0.0)), (0.0, (153, 0, 0.0, 0.0)), (2**-6, (151, 110, 0.0, 0.0)), (0.0, (152, 0, 0.0, 2**-5))]


@example(LATE, 8, 10)
@given(ARRIVALS, st.sampled_from([8, 33, 64]), st.sampled_from([4, 10, 100]))
def test_an_engine_by_itself_equals_stepping(arrivals, tokens, room):
    fast, slow = (
        Engine(forward, tokens, room).serve([(at, Request(*request)) for at, request in arrivals])
        for forward in (True, False)
    )
    assert fast == slow


@pytest.mark.parametrize("late", [None, 0.0, 2**-8], ids=["alone", "as a step ends", "within a step"])
def test_a_long_prompt_beside_one_that_decodes_takes_few_events(late):
    at = 0.0
    if late is not None:
        alone = Engine(fast=False)
        alone.serve([(0.0, Request(64, 4000)), (1.0, Request(2000, 2))])
        at = alone.woken[200] + late
    found = []
    for fast in (True, False):
        arrivals = [(0.0, Request(64, 4000)), (1.0, Request(2000, 2))]
        if late is not None:
            arrivals.append((at, Request(10, 2)))
        engine = Engine(fast)
        found.append((engine.serve(arrivals), len(engine.woken)))
    (fast_times, few), (slow_times, many) = found
    assert fast_times == slow_times
    assert many > 4000
    assert few < 50  # the prompt alone takes ten times as many steps


def test_a_request_that_waits_is_admitted_with_the_step_after_blocks_came():
    found = []
    for fast in (True, False):
        engine, late = Engine(fast), Request(1900, 2, keys_per_token=math.inf)

        def come(now, engine=engine, late=late):
            engine.stored[late] = 1890
            engine.engine.cut(now)

        found.append(engine.serve([(0.0, Request(64, 4000)), (1.0, Request(2000, 2)), (4.0, late), (5.0, come)]))
    assert found[0] == found[1]
    _, (long, _), (short, _) = found[0]
    assert 5.0 < short < 7.0 < long

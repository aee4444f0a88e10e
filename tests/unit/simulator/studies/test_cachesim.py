"""The pass over stack distances against slow, obvious caches, and against what is published."""

import math
from collections import OrderedDict
from functools import cache
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulator.published import published
from warmkv.config import Eviction
from warmkv.policies import eviction
from warmkv.simulator import traces
from warmkv.simulator.studies import cachesim
from warmkv.simulator.studies.cachesim import CacheSimError, Correction
from warmkv.simulator.traces.columns import Builder, Row

BLOCK = 4
CAPACITIES = (0, 1, 3, 4, 5, 8, 11, 12, 17, 24, 40, 1000)


def trace_of(prompts, size=BLOCK):
    """A trace of (arrival, blocks, tokens in the last block, session) in order."""
    builder = Builder("test")
    for at, blocks, rest, session in prompts:
        tokens = max(0, len(blocks) - 1) * size + (min(rest, size) if blocks else size - 1)
        if tokens:
            builder.add(Row(at, tokens, 1, blocks, size, str(session), str(session)))
    return builder.build()


@st.composite
def chains(draw, repeats=False, most=14, longest=6):
    """Prompts over a small tree; a partial last block has a number of its own, as its content is its own."""
    requests, now = [], 0.0
    for _ in range(draw(st.integers(0, most))):
        now += draw(st.sampled_from([0.0, 1.0, 1.0, 5.0, 60.0]))
        branch, length = draw(st.integers(0, 2)), draw(st.integers(0, longest))
        shared = draw(st.integers(0, length))
        blocks = [100 + i if i < shared else 200 + 100 * shared + 10 * branch + i for i in range(length)]
        if repeats:
            blocks = draw(st.lists(st.integers(0, 5), max_size=6))
        rest = BLOCK
        if blocks and not repeats and draw(st.booleans()):
            rest = draw(st.integers(1, BLOCK - 1))
            blocks[-1] = 10_000 + 100 * blocks[-1] + rest
        requests.append((now, blocks, rest, draw(st.integers(0, 1))))
    return requests


def obvious(trace, capacity, ttl=math.inf, tail_first=False):
    """Blocks found of each request: a list by recency, and the time of the last use."""
    sizes, cache, found = trace.block_tokens(), OrderedDict(), []
    for i in range(len(trace)):
        chain, now = trace.chain(i).tolist(), trace.arrival[i]
        hit = 0
        while hit < len(chain) and chain[hit] in cache and now - cache[chain[hit]][1] <= ttl:
            hit += 1
        found.append(hit)
        uses = list(zip(chain, sizes[trace.offsets[i] : trace.offsets[i + 1]], strict=True))
        for key, size in reversed(uses) if tail_first else uses:
            cache[key] = (size, now)
            cache.move_to_end(key)
            for old in [old for old, (_, used) in cache.items() if now - used > ttl]:
                del cache[old]
            while sum(size for size, _ in cache.values()) > capacity:
                cache.popitem(last=False)
    return found


def totals(trace, found):
    sizes = trace.block_tokens()
    tokens = sum(int(sizes[trace.offsets[i] : trace.offsets[i] + hit].sum()) for i, hit in enumerate(found))
    return tokens, sum(found)


@given(chains(), st.booleans())
def test_every_capacity_finds_what_an_obvious_lru_finds(prompts, tail_first):
    trace = trace_of(prompts)
    curve = cachesim.lru(trace, tail_first=tail_first)
    for capacity in CAPACITIES:
        hits = curve.hits(capacity)
        assert (hits.tokens, hits.blocks) == totals(trace, obvious(trace, capacity, tail_first=tail_first))


@given(chains(repeats=True))
def test_a_block_may_come_twice_in_a_prompt(prompts):
    trace = trace_of(prompts)
    curve = cachesim.lru(trace)
    for capacity in CAPACITIES:
        assert curve.hits(capacity).blocks == totals(trace, obvious(trace, capacity))[1]


@given(chains(), st.sampled_from([0.5, 1.0, 5.0, 6.0, 60.0, 61.0]), st.booleans())
def test_every_lifetime_and_capacity_finds_what_an_obvious_cache_finds(prompts, ttl, tail_first):
    trace = trace_of(prompts)
    curve = cachesim.lru(trace, tail_first=tail_first)
    for capacity in (*CAPACITIES, math.inf):
        hits = curve.hits(capacity, ttl)
        assert (hits.tokens, hits.blocks) == totals(trace, obvious(trace, capacity, ttl, tail_first))


@given(chains(), st.sampled_from([1.0, 5.0, 60.0, math.inf]), st.sampled_from(["global", "session"]))
def test_the_index_of_the_stores_under_lru_finds_what_the_pass_finds(prompts, ttl, scope):
    """Equal blocks only: what an index does where a small block still fits and a large one does not, is its own."""
    trace = trace_of([(at, blocks, BLOCK, session) for at, blocks, _, session in prompts])
    correction = Correction(2, 5)
    curve = cachesim.lru(trace, tail_first=True, correction=correction, scope=scope)
    for capacity in (*CAPACITIES, math.inf):
        hits = cachesim.by_order(trace, eviction.lru, capacity, ttl, correction=correction, scope=scope)
        assert hits == curve.hits(capacity, ttl)


@given(chains(), st.sampled_from([1.0, 60.0, math.inf]))
def test_with_room_for_all_every_order_finds_all(prompts, ttl):
    trace = trace_of(prompts)
    for name in get_args(Eviction):
        order = eviction.order(name, eviction.PrefillCost(8))
        assert cachesim.by_order(trace, order, math.inf, ttl) == cachesim.lru(trace).hits(math.inf, ttl)
        assert cachesim.by_order(trace, order, 0.0, ttl).blocks == 0
        blocks = cachesim.by_order(trace, order, 1000, ttl, unit="blocks")
        assert blocks == cachesim.lru(trace, unit="blocks").hits(1000, ttl)


def test_orders_give_up_what_they_say():
    def found(name, capacity, *prompts):
        trace = trace_of([(at, blocks, BLOCK, 0) for at, blocks in enumerate(prompts)])
        return cachesim.by_order(trace, eviction.order(name, eviction.PrefillCost(8)), capacity, unit="blocks").blocks

    often_read = [1], [1], [2], [3], [1]
    assert (found("lru", 2, *often_read), found("lfu", 2, *often_read)) == (1, 2)
    short = [1], [2, 3], [4], [1]
    assert (found("lru", 3, *short), found("length", 3, *short)) == (0, 1)


def most_blocks(trace, capacity):
    """Return the most blocks that any cache could find: all that it may keep is tried."""
    prompts = [tuple(part) for part in np.split(trace.blocks, trace.offsets[1:-1])] if len(trace) else []

    @cache
    def most(number, held):
        if number == len(prompts):
            return 0
        chain = prompts[number]
        hit = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        known = held | set(chain)
        kept = (frozenset(some) for size in range(capacity + 1) for some in combinations(sorted(known), size))
        return hit + max(most(number + 1, some) for some in kept)

    return most(0, frozenset())


@settings(max_examples=25)
@given(chains(most=5, longest=4), st.integers(0, 3))
def test_the_optimum_is_the_most_that_any_cache_finds(prompts, capacity):
    trace = trace_of(prompts)
    assert cachesim.optimal(trace, capacity, unit="blocks").blocks == most_blocks(trace, capacity)


@settings(max_examples=30)
@given(chains(), st.sampled_from([1.0, 60.0, math.inf]), st.sampled_from(["global", "session"]))
def test_no_order_finds_more_than_the_optimum(prompts, ttl, scope):
    trace = trace_of(prompts)
    for capacity in (0, 2, 5):
        bound = cachesim.optimal(trace, capacity, ttl, unit="blocks", scope=scope)
        for name in get_args(Eviction):
            order = eviction.order(name, eviction.PrefillCost(8))
            assert cachesim.by_order(trace, order, capacity, ttl, unit="blocks", scope=scope).blocks <= bound.blocks
    assert cachesim.optimal(trace, math.inf, ttl, scope=scope) == cachesim.lru(trace, scope=scope).hits(math.inf, ttl)


def test_an_independent_simulator_finds_as_much():
    """On a public trace: LRU and the optimum of kvcache-simulator, which counts once its cache is full."""
    pytest.importorskip("kvcache_sim", reason="pip install kvcache-simulator")
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import TraceData

    trace = traces.read(published("mooncake_conversation.jsonl")).take(np.arange(1500))
    for capacity in (300, 3000):
        filled = np.concatenate([np.arange(-capacity, 0), np.unique(trace.blocks, return_inverse=True)[1]])
        starts = [0, *(trace.offsets + capacity).tolist()]
        one = [1] * len(filled)
        plan = build_execution_plan(
            TraceData(filled.tolist(), one, starts, 1, len(starts) - 1, 0, 0, 0.0, 0, 0), 1.5 / (len(starts) - 1)
        )
        found = {name: simulate_policy(plan, name, capacity).hitTokens for name in ("lru", "optimal")}
        assert found == {
            "lru": cachesim.lru(trace, unit="blocks", tail_first=True).hits(capacity).blocks,
            "optimal": cachesim.optimal(trace, capacity, unit="blocks").blocks,
        }


@pytest.mark.parametrize("prompts", [[(0, [1, 1], 4, 0)], [(0, [1, 2], 4, 0), (1, [2], 2, 0)]])
def test_blocks_that_do_not_stand_for_prefixes_are_for_the_pass_only(prompts):
    with pytest.raises(CacheSimError, match="the same block twice"):
        cachesim.by_order(trace_of(prompts), eviction.lfu, 10)


@given(chains(), st.sampled_from([Correction(), Correction(2, 0), Correction(0, 7), Correction(2, 7)]))
def test_more_room_and_longer_lives_never_find_less(prompts, correction):
    curve = cachesim.lru(trace_of(prompts), correction=correction)
    for ttl in (1.0, 5.0, math.inf):
        rates = [curve.hits(capacity, ttl).token_rate for capacity in (*CAPACITIES, math.inf)]
        assert rates == sorted(rates)
        assert all(0 <= rate <= 1 for rate in rates)
    for capacity in CAPACITIES:
        rates = [curve.hits(capacity, ttl).token_rate for ttl in (0.0, 1.0, 5.0, 60.0, math.inf)]
        assert rates == sorted(rates)


@given(chains(), st.integers(0, 3), st.integers(0, 9))
def test_corrections_add_to_every_hit_what_they_say(prompts, partial, least):
    trace = trace_of(prompts)
    curve = cachesim.lru(trace, correction=Correction(partial, least))
    for capacity in CAPACITIES:
        tokens = 0
        for i, hit in enumerate(obvious(trace, capacity)):
            prompt = int(trace.input_tokens[i])
            found = min(hit * BLOCK, prompt)
            if hit:
                found += partial if found < prompt else 0
                tokens += min(max(found, least), prompt)
        assert curve.hits(capacity).tokens == tokens


@given(chains())
def test_a_cache_for_each_session_sees_only_its_requests(prompts):
    trace = trace_of(prompts)
    curve = cachesim.lru(trace, scope="session")
    parts = [trace.take(np.flatnonzero(trace.session == number)) for number in set(trace.session.tolist())]
    for capacity in CAPACITIES:
        assert curve.hits(capacity).tokens == sum(cachesim.lru(part).hits(capacity).tokens for part in parts)
    assert curve.hits(12).tokens == cachesim.lru(trace, scope="tenant").hits(12).tokens


@given(chains())
def test_capacity_in_blocks_weighs_all_alike(prompts):
    trace = trace_of(prompts, size=1)
    for capacity in range(8):
        assert cachesim.lru(trace, unit="blocks").hits(capacity) == cachesim.lru(trace).hits(capacity)


def test_the_least_enough_capacity_is_enough():
    curve = cachesim.lru(trace_of([(0, [1, 2], 4, 0), (1, [3], 4, 0), (2, [1, 2], 4, 0)]))
    assert curve.enough == 12
    assert curve.hits(12).blocks == 2 > curve.hits(11).blocks


def test_an_empty_trace_finds_nothing():
    assert cachesim.lru(trace_of([])).hits(100) == cachesim.Hits(0, 0, 0.0, 0.0)
    assert cachesim.lru(trace_of([]), scope="session").enough == 0


def test_questions_that_a_trace_cannot_answer_are_refused():
    builder = Builder("azure")
    builder.add(Row(0.0, 100, 1))
    with pytest.raises(CacheSimError, match="azure has no block hashes"):
        cachesim.lru(builder.build())
    builder.add(Row(0.0, 4, 1, [1], 4))
    with pytest.raises(CacheSimError, match="does not tell the session"):
        cachesim.lru(builder.build(), scope="session")


def test_round_capacities_end_with_one_that_is_enough():
    assert cachesim.round_capacities(60_000) == [10e3, 20e3, 50e3, 100e3]
    assert cachesim.round_capacities(0) == [10e3]


# --- published figures ----------------------------------------------------------------------------------------------

FIGURE_9 = {10e3: 0.0449, 100e3: 0.0731, 1e6: 0.0866, 2e6: 0.1202, 4e6: 0.2149, 5e6: 0.2471, 8e6: 0.2997} | {
    10e6: 0.3263,
    50e6: 0.3983,
    100e6: 0.4006,
}
BY_BLOCK = {1000: 0.0445, 10_000: 0.2112, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637}
BY_TTL = {60: 0.7536, 300: 0.9161, 600: 0.9369, 1800: 0.9532, 3600: 0.9614, math.inf: 0.9645}


@pytest.fixture(scope="module")
def conversation():
    return traces.read(published("mooncake_conversation.jsonl"), strict=True)


def test_mooncake_figure_9(conversation):
    """FAST'25, Figure 9, token hit rate of one LRU on the conversation trace."""
    curve = cachesim.lru(conversation, correction=Correction(partial=256, least=880))
    for capacity, rate in FIGURE_9.items():
        assert curve.hits(capacity).token_rate == pytest.approx(rate, abs=0.006)


def test_the_conversation_trace_by_block_to_four_digits(conversation):
    assert (len(conversation), len(conversation.blocks)) == (12_031, 288_500)
    curve = cachesim.lru(conversation, unit="blocks")
    for capacity, rate in BY_BLOCK.items():
        assert round(curve.hits(capacity).block_rate, 4) == rate
    ideal = curve.hits(math.inf)
    assert (round(ideal.block_rate, 4), round(ideal.token_rate, 4)) == (0.3664, 0.3736)


@pytest.mark.soak
def test_lifetimes_of_the_agentic_sessions():
    trace = traces.read(published("agentic_coding_60_sessions.jsonl.gz"), strict=True)
    assert trace.input_tokens.sum(dtype=np.int64) == pytest.approx(523e6, rel=0.001)
    curve = cachesim.lru(trace, scope="session")
    for ttl, rate in BY_TTL.items():
        assert curve.hits(math.inf, ttl).token_rate == pytest.approx(rate, abs=0.001)
    assert cachesim.lru(trace).hits(math.inf, 300.0) == curve.hits(math.inf, 300.0)


@pytest.mark.parametrize(("name", "requests", "cv"), [("conv", 19_366, 1.09), ("code", 8_819, 13.2)])
def test_arrivals_of_the_azure_traces(name, requests, cv):
    trace = traces.read(published(f"azure_2023_{name}.csv"), strict=True)
    gaps = np.diff(trace.arrival)
    assert len(trace) == requests
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.01)

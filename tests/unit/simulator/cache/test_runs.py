"""Blocks by runs against the index of the live stores, block by block."""

import random
from collections import defaultdict
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.cluster.test_transfers import EAGER
from tests.unit.simulator.conversations import EXACT, config
from tests.unit.simulator.workload.test_requests import BLOCK, INSTANT, sessions, trace_of
from warmkv.policies.tiers import tiers_of
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.runs import layout
from warmkv.simulator.cluster.cluster import simulate
from warmkv.simulator.cluster.stores import follows_runs
from warmkv.simulator.steps.costs import StepCost
from warmkv.simulator.studies.replay import prepare, summarise
from warmkv.simulator.studies.variants import Variant
from warmkv.simulator.workload.requests import of_trace

A, B, C, D, E = (bytes([n]) for n in range(1, 6))
SLOW = StepCost(0.5, 0.0, 0.0)  # prompts take longer than prefixes live


def test_a_run_ends_where_prompts_end_or_part():
    found = layout([(A, B, C), (A, B, C, D), (), (A, B, E)])
    assert found is not None
    assert [[found.lengths[run] for run in runs] for runs in found.runs] == [[2, 1], [2, 1, 1], [], [2, 1]]
    assert found.runs[0] == found.runs[1][:2]


@st.composite
def trees(draw):
    """Prompts over a tree of blocks, or over one in which a block has come to stand behind two others."""
    parents, blocks = [None], [bytes([number]) for number in range(20)]
    parents += [draw(st.integers(0, number - 1)) for number in range(1, 20)]

    def path(at):
        return () if at is None else (*path(parents[at]), blocks[at])

    prompts = [path(at) for at in draw(st.lists(st.integers(0, 19), min_size=1, max_size=12))]
    if draw(st.booleans()):
        prompts.append(tuple(draw(st.lists(st.sampled_from(blocks), max_size=4))))
    return draw(st.permutations(prompts))


@given(trees())
def test_runs_are_laid_out_as_an_obvious_pass_over_all_blocks_does(prompts):
    before, after = defaultdict(set), defaultdict(set)
    for prompt in prompts:
        for parent, block in zip((None, *prompt), (*prompt, None), strict=True):
            before[block].add(parent)
            after[parent].add(block)
    found = layout(prompts)
    if any(len(parents) > 1 for block, parents in before.items() if block is not None):
        assert found is None
        return
    assert found is not None
    chains = set()
    for prompt, runs in zip(prompts, found.runs, strict=True):
        ends = [end for end, block in enumerate(prompt, 1) if len(after[block]) > 1 or None in after[block]]
        assert [found.lengths[run] for run in runs] == [end - start for start, end in pairwise([0, *ends])]
        assert [found.parents[run] for run in runs] == [-1, *runs][: len(runs)]
        chains |= {(run, prompt[:end]) for run, end in zip(runs, ends, strict=True)}
    assert len(chains) == len({run for run, _ in chains}) == len({chain for _, chain in chains}) == len(found.lengths)


@pytest.mark.parametrize("prompts", [[(A, B), (C, B)], [(A, B, A)], [(A, B), (B, C)], [(B, C), (A, B)]])
def test_blocks_that_stand_for_no_prefix_have_no_runs(prompts):
    assert layout(prompts) is None


def outcome(rows, settings, variant, cost, *, by_runs):
    requests = of_trace(trace_of(*rows), settings)
    jobs, lifetimes = prepare(requests.records, settings, variant, requests.turns)
    token_bytes = kv_shape(settings).token_bytes
    done = simulate(jobs, settings, lifetimes, token_bytes, cost, by_runs=by_runs)
    result = asdict(summarise(jobs, done, settings, lifetimes, variant).result)
    means = [level.pop("mean") for level in (result["stored"], result["slots"], *result["tiers"].values())]
    times = [(job.replica, job.started, job.first, job.finished, job.match.blocks, job.reused) for job in jobs]
    return times, result, pytest.approx(means) if by_runs else means


ROOMS = st.integers(0, 14).map(lambda blocks: blocks * BLOCK * 2 + 3)  # bytes


@given(
    sessions(),
    st.tuples(ROOMS, ROOMS, ROOMS),
    st.integers(1, 3),
    st.sampled_from([0.5, 1.0, 4.0, 16.0, 1e9, float("inf")]),
    st.sampled_from([1, 1, 3]),
    st.sampled_from([EXACT, INSTANT, SLOW]),
    st.sampled_from(["[]", "[]", "[{at: 0.25, seconds: 0}, {at: 2, seconds: 0.5}]"]),
    st.booleans(),
)
def test_runs_give_what_the_indexes_give(rows, rooms, tiers, ttl, replicas, cost, failures, fetches):
    device, host, disk = (room if tier < tiers else 0 for tier, room in enumerate(rooms))
    settings = config(
        f"prefix_cache.memory_bytes={device}",
        f"prefix_cache.host.memory_bytes={host}",
        f"prefix_cache.disk={{memory_bytes: {disk + 4096 * 6 if disk else 0}, path: {'disk' if disk else 'null'}}}",
        f"cluster.replicas={replicas}",
        f"simulator.failures={failures}",
        "simulator.startup_seconds=0.5",
        *(EAGER if fetches else ()),
    )
    slow, fast = (outcome(rows, settings, Variant(ttl=ttl), cost, by_runs=by_runs) for by_runs in (False, True))
    assert slow == fast


def long_trace(chance):
    """Up to 60 requests that share beginnings, in sessions."""
    rows, now = [], 0.0
    for _ in range(chance.randint(1, 60)):
        now += chance.choice([0.0, 0.0, 2**-7, 0.25, 1.0, 8.0])
        branch, length = chance.randint(0, 3), chance.randint(0, 9)
        shared = chance.randint(0, length)
        blocks = [100 + i if i < shared else 200 + 100 * shared + 10 * branch + i for i in range(length)]
        tokens = length * BLOCK + chance.randint(0 if blocks else 1, BLOCK - 1)
        rows.append((now, blocks, tokens, chance.randint(0, 6), chance.choice("abc"), chance.choice([0.0, 0.5, 4.0])))
    return rows


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_runs_give_what_the_indexes_give_in_long_traces(tiers):
    """Where a tier below is smaller than a prompt, and what moves down displaces what a request reads."""
    evictions = 0
    for seed in range(60):
        chance = random.Random(f"{tiers} {seed}")
        device, host, disk = (BLOCK * 2 * chance.randint(0, 25) + 3 if tier < tiers else 0 for tier in range(3))
        settings = config(
            f"prefix_cache.memory_bytes={device}",
            f"prefix_cache.host.memory_bytes={host}",
            f"prefix_cache.disk={{memory_bytes: {disk + 4096 * 9 if disk else 0}, path: {'disk' if disk else 'null'}}}",
            f"cluster.replicas={chance.choice([1, 1, 2, 3])}",
            f"engine.max_slots={chance.randint(1, 4)}",
            *(EAGER if chance.random() < 0.5 else ()),
        )
        variant = Variant(ttl=chance.choice([1.0, 4.0, 16.0, 64.0, float("inf")]))
        rows, cost = long_trace(chance), chance.choice([EXACT, INSTANT, SLOW])
        slow, fast = (outcome(rows, settings, variant, cost, by_runs=by_runs) for by_runs in (False, True))
        assert slow == fast
        evictions += slow[1]["evictions"]
    assert evictions > 1000


@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        ((), True),
        (("prefix_cache.host.memory_bytes=1MB",), True),
        (("prefix_cache.eviction=cost",), False),
        (("prefix_cache.tenant_share=0.5",), False),
        (("prefix_cache.automatic=false",), False),
        (("compression.policy=h2o@4",), False),
    ],
)
def test_runs_are_taken_only_where_they_are_exact(flags, taken):
    settings = config(*flags)
    requests = of_trace(trace_of((0.0, [1, 2], 9, 3, None, 0.0)), settings)
    jobs, lifetimes = prepare(requests.records, settings, Variant())
    tiers = tiers_of(settings.prefix_cache, kv_shape(settings))
    assert follows_runs(jobs, settings, tiers, lifetimes) == taken

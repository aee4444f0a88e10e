import gc
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT, config, logs, record, run
from warmkv.config import load
from warmkv.policies import budgets, slot_sizes
from warmkv.policies.budgets import kept_tokens
from warmkv.policy_spec import PolicySpec
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.measures import TimeWeightedGauge, percentiles
from warmkv.simulator.steps.costs import StepCost, StepKind
from warmkv.simulator.studies.replays.bills import billed
from warmkv.simulator.studies.replays.replay import prepare, replay
from warmkv.simulator.studies.replays.variants import Variant, VariantError, grid, policy_spec, price_tier
from warmkv.simulator.workload import generator
from warmkv.simulator.workload.job_sizes import size_classes
from warmkv.simulator.workload.sessions import Workload

TTLS = {"5m": 300.0, "1h": 3600.0}


@pytest.fixture(scope="module")
def conversations():
    settings = Workload(sessions=60, hours=0.2, length_scale=0.3, think_scale=0.5)
    return generator.generate(settings, np.random.SeedSequence(1), load(environ={}))


def one(records, settings, variant=Variant(), cost=EXACT):
    return replay(records, settings, [variant], cost)[0]


def test_billing_by_hand():
    """A document of 10 tokens asked about three times, the last time after the 5m TTL."""
    document = list(range(10))
    ask = [
        record(at, [*document, *[50 + n] * 6], 2, ends=[10, 16], ttls=["5m", None]) for n, at in enumerate((0, 60, 900))
    ]
    result = one(ask, config())
    assert asdict(result.usage) == {"input": 18, "read": 10, "written": {"5m": 20, "1h": 0}, "output": 6}
    assert result.dollars == pytest.approx((18 * 3 + 10 * 0.3 + 20 * 3.75 + 6 * 15) / 1e6)
    assert result.dollars_uncached == pytest.approx((48 * 3 + 6 * 15) / 1e6)
    assert (result.reused_tokens, result.prompt_tokens) == (10, 48)
    assert result.token_hit_rate == 10 / 48
    assert result.block_hit_rate == 2 / 12

    longer = one(ask, config(), Variant(ttl=3600.0))
    assert asdict(longer.usage) == {"input": 18, "read": 20, "written": {"1h": 10}, "output": 6}
    assert longer.dollars == pytest.approx((18 * 3 + 20 * 0.3 + 10 * 6 + 6 * 15) / 1e6)


def test_a_read_refreshes_the_lifetime():
    ask = [record(at, [1] * 10, 1, ends=[10], ttls=["5m"]) for at in (0, 299, 598, 897)]
    assert one(ask, config()).usage.read == 30
    assert one(ask, config(), Variant(ttl=298.0)).usage.read == 0


def test_requests_in_parallel_all_write():
    ask = [record(0.0, [1] * 40, 1, ends=[40], ttls=["5m"], name=str(n)) for n in range(3)]
    result = one(ask, config("cluster.replicas=3"))
    assert result.usage.written["5m"] == 120


def test_requests_in_parallel_are_all_billed_as_writers():
    """They come before the first answer begins, though all but one find the prefix computed when it is their turn."""
    alike = [record(0.0, [1] * 12, 3, ends=[12], ttls=["5m"], name=str(n)) for n in range(4)]
    later = record(60.0, [1] * 12, 3, ends=[12], ttls=["5m"], name="later")
    result = one([*alike, later], config())
    assert result.reused_tokens == 4 * 11
    assert (result.usage.total_written, result.usage.read) == (4 * 12, 12)


def test_a_disabled_cache_bills_everything_as_input():
    ask = [record(at, [1] * 10, 1, ends=[10], ttls=["5m"]) for at in (0, 9)]
    result = one(ask, config("prefix_cache.enabled=false"))
    assert (result.usage.input, result.usage.read, result.usage.total_written, result.reused_tokens) == (20, 0, 0, 0)
    assert result.dollars == result.dollars_uncached


@given(logs(), st.sampled_from([None, 10.0, 300.0, 7200.0]), st.sampled_from(["full", "snapkv"]))
def test_tokens_are_conserved(records, ttl, policy):
    settings = config("cluster.replicas=2", "engine.kv_bytes=150B")
    variant = Variant(ttl, policy_spec(policy, 1.0 if policy == "full" else 0.5, PolicySpec()))
    jobs, lifetimes = prepare(records, settings, variant)
    jobs, _ = run(records, settings, variant)
    served = [job for job in jobs if job.replica]
    result = one(records, settings, variant)
    assert result.refused == len(records) - len(served)
    assert result.usage.prompt == result.prompt_tokens == sum(job.record.input_tokens for job in served)
    assert result.usage.output == sum(job.record.output_tokens for job in served)
    assert all(billed(job, lifetimes).prompt == job.record.input_tokens for job in served)
    assert 0 <= result.token_hit_rate < 1
    assert 0 <= result.block_hit_rate <= 1
    assert result.slots.mean <= result.slots.peak
    assert result.stored.mean <= result.stored.peak + 1e-6


def test_the_same_arguments_give_the_same_results(conversations):
    settings = load(flags=["cluster.replicas=3", "routing.policy=power_of_two"], environ={})
    variants = grid(settings.compression.policy)
    cost = StepCost(0.004, 1e-4, 1e-8)
    assert replay(conversations, settings, variants, cost) == replay(conversations, settings, variants, cost)


def test_a_longer_ttl_never_hits_less(conversations):
    settings = load(flags=["prefix_cache.memory_bytes=1TiB"], environ={})
    ttls = [1.0, 10.0, 60.0, 300.0, 1000.0, 3600.0, 1e9, float("inf")]
    results = replay(conversations, settings, [Variant(ttl) for ttl in ttls], EXACT)
    assert [r.evictions for r in results] == [0] * len(ttls)
    for rates in ([r.token_hit_rate for r in results], [r.block_hit_rate for r in results]):
        assert rates == sorted(rates)
    reads = [result.usage.read for result in results]
    assert reads == sorted(reads)
    assert results[0].token_hit_rate < results[-1].token_hit_rate
    assert results[-1].expirations == 0


def test_a_larger_store_never_hits_less(conversations):
    bare = [replace(r, marks=(), reads=()) for r in conversations]  # tails are smaller than blocks: no stack property
    rates = []
    for blocks in (0, 1, 5, 20, 50, 100, 300, 1000, 5000):
        memory = blocks * 64 * 3072
        settings = load(flags=[f"prefix_cache.memory_bytes={memory}"], environ={})
        rates.append(one(bare, settings, Variant(ttl=float("inf")), StepCost(0, 0, 0)).block_hit_rate)
    assert rates == sorted(rates)
    assert rates[0] == 0 < rates[3] < rates[-1]


def test_a_budget_bounds_the_slots_and_leaves_the_bill_alone(conversations):
    settings = load(environ={})
    full, half, tenth = replay(
        conversations,
        settings,
        [
            Variant(300.0, policy_spec(name, share, PolicySpec()))
            for name, share in (("full", 1.0), ("streaming_llm", 0.5), ("streaming_llm", 0.1))
        ],
        StepCost(0, 0, 0),
    )
    assert full.slots.peak > half.slots.peak > tenth.slots.peak
    assert full.usage == half.usage == tenth.usage
    assert full.dollars == tenth.dollars


def test_smaller_slots_serve_more_at_once():
    crowd = [record(0.0, [n] * 40, 20, name=str(n)) for n in range(4)]
    settings = config("engine.kv_bytes=240B")
    full, small = replay(
        crowd,
        settings,
        [Variant(policy=PolicySpec()), Variant(policy=PolicySpec(name="streaming_llm", budget=8))],
        EXACT,
    )
    assert small.e2e.p99 < full.e2e.p99


def test_an_empty_log_is_all_zeros():
    result = one([], config())
    assert (result.requests, result.dollars, result.token_hit_rate, result.seconds) == (0, 0.0, 0.0, 0.0)
    assert (result.ttft.p99, result.slots.peak, result.stored.mean) == (0.0, 0, 0.0)


def test_one_request_that_draws_nothing_is_billed_and_stored():
    """Pre-warming: max_tokens 0 writes the cache."""
    prompts = [record(0.0, [1] * 10, 0, ends=[10], ttls=["5m"]), record(9.0, [1] * 10, 0, ends=[10], ttls=["5m"])]
    result = one(prompts, config())
    assert asdict(result.usage) == {"input": 0, "read": 10, "written": {"5m": 10, "1h": 0}, "output": 0}
    assert result.slots.peak == 0


def test_progress_reports_every_variant(conversations):
    seen = []
    replay(conversations, load(environ={}), [Variant(), Variant(60.0)], EXACT, progress=lambda *at: seen.append(at))
    assert seen[-1] == (1, len(conversations))
    assert (0, len(conversations)) in seen
    assert seen == sorted(seen)


def test_a_recorded_policy_is_the_one_that_ran_knobs_included():
    specs = [PolicySpec(name="snapkv", budget=8, window=3), PolicySpec(name="snapkv", budget=35)]
    jobs, _ = prepare([record(0, [1] * 40, policy=spec.label) for spec in specs], config(), Variant())
    assert [job.recomputed for job in jobs] == [3, 32]
    assert [job.kept for job in jobs] == [kept_tokens(spec, 40) for spec in specs]


def test_a_log_of_other_settings_is_refused_with_the_reason():
    with pytest.raises(VariantError, match=r"request x: policy 'magic@3': name"):
        one([record(0, [1], policy="magic@3", name="x")], config())
    marked = [record(0, [1] * 4, ends=[4], ttls=["2h"], name="x")]
    with pytest.raises(VariantError, match=r"request x: TTL '2h' is not one of prefix_cache.ttls \(5m, 1h\)"):
        one(marked, config())
    assert one(marked, config(), Variant(60.0)).usage.written == {"5m": 4}


@pytest.mark.parametrize(("ttl", "tier"), [(1, "5m"), (300, "5m"), (301, "1h"), (3600, "1h"), (9999, "1h")])
def test_a_lifetime_is_sold_under_the_shortest_ttl_that_lasts_as_long(ttl, tier):
    assert price_tier(ttl, TTLS) == price_tier(ttl, dict(reversed(TTLS.items()))) == tier


def test_the_grid_has_a_baseline_and_every_combination():
    base = PolicySpec(name="snapkv", window=7)
    labels = [(variant.label, variant.ttl) for variant in grid(base)]
    assert labels[:2] == [("full", 300.0), ("full", 3600.0)]
    assert len(set(labels)) == 10
    assert {(v.policy.name, v.policy.window) for v in grid(base) if v.policy} == {
        ("full", None),
        ("snapkv", 7),
        ("streaming_llm", None),
    }
    with pytest.raises(VariantError, match=r"policy snapkv at budget 2\.0: .*share"):
        grid(PolicySpec(), budgets=[2.0])
    with pytest.raises(VariantError, match="TTL must be a positive"):
        grid(PolicySpec(), ttls=[0.0])


def test_a_policy_without_a_budget_is_one_variant_for_each_ttl():
    variants = grid(PolicySpec(), [300, 600], [0.2, 0.5], ["auto", "snapkv", "kivi"])
    kivi = PolicySpec.model_validate("kivi").label
    labels = ["full", "auto", "snapkv@0.2", "snapkv@0.5", kivi]
    assert [(variant.label, variant.ttl) for variant in variants] == [
        (label, ttl) for label in labels for ttl in (300, 600)
    ]


def test_a_level_is_averaged_over_time_in_any_order():
    level = TimeWeightedGauge()
    for amount, at in [(10, 1.0), (-10, 5.0), (20, 3.0)]:
        level.change(amount, at)
    assert level.mean(10.0) == pytest.approx((10 * 4 + 20 * 7) / 10)
    assert TimeWeightedGauge().mean(0.0) == 0


def test_a_peak_is_that_of_the_times_of_changes():
    """Report an expiration late, with its own time."""
    level = TimeWeightedGauge()
    for amount, at in [(1, 1.0), (1, 400.0), (-1, 301.0)]:
        level.change(amount, at)
    assert (level.peak, TimeWeightedGauge().peak) == (1, 0)


def test_percentiles_interpolate():
    assert percentiles([float(n) for n in range(101)]).p90 == 90
    assert percentiles([]).p50 == 0


def test_kv_shape_is_the_configured_one():
    assert kv_shape(load(environ={})).token_bytes == 2 * 6 * 2 * 32 * 4


POLICIES = (
    "full",
    "kivi",
    "auto",
    "snapkv@6",
    "snapkv@0.5+kivi2",
    "streaming_llm@0.5",
    "h2o@0.3",
    "tova@9",
    "adakv@0.2",
    "pyramidkv@40:window=4",
    "rocketkv@0.3",
    "fastgen",
    "adaptive",
)


@given(logs(policies=POLICIES), st.integers(2, 4))
def test_a_job_takes_what_its_policy_says(records, layers):
    settings = config(
        f"simulator.model={{layers: {layers}, kv_heads: 2, head_dim: 8, dtype_bytes: 2}}", "engine.max_context=80"
    )
    shape = kv_shape(settings)
    jobs, _ = prepare(records, settings, Variant())
    for job in jobs:
        prompt, allowed = job.record.input_tokens, job.record.output_tokens
        spec = budgets.in_force(PolicySpec.model_validate(job.record.policy), prompt, allowed)
        assert job.kind == StepKind.of(spec)
        assert job.kept == budgets.kept_tokens(spec, prompt)
        assert job.recomputed == budgets.recomputed_tokens(spec, prompt)
        assert job.workspace_bytes == slot_sizes.workspace_bytes(spec, shape, prompt, len(job.marks))
        assert job.sum_bytes == slot_sizes.column_sum_bytes(spec, shape, prompt)
        assert job.endless == budgets.is_endless(spec, prompt, allowed, 80)
        decodes = allowed > 1
        assert job.capacity == decodes * budgets.slot_capacity(spec, prompt, allowed)
        assert job.slot_bytes == decodes * slot_sizes.slot_bytes(spec, shape, prompt, allowed)


def test_the_collector_rests_during_a_replay_and_is_as_before_then(conversations):
    seen = []
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            replay(
                conversations, load(environ={}), [Variant()], EXACT, progress=lambda *at: seen.append(gc.isenabled())
            )
            assert gc.isenabled() == before
        finally:
            gc.enable()
    assert not any(seen)


def test_size_classes_of_many_are_those_of_each():
    entries = np.array([*range(70_000), *(2**bits + more for bits in range(17, 40) for more in (-1, 0, 1))])
    assert size_classes(entries).tolist() == [slot_sizes.size_class(each) for each in entries.tolist()]

"""Rows of a bench: all there, and their bytes those of the slots. No time is ever compared."""

import math

import pytest

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import bench, decoding, synthetic, ttft
from warmkv.measuring.plan import BenchPlan, MeasureError
from warmkv.measuring.spread import Spread
from warmkv.policies import budgets, compression
from warmkv.policies.slot_sizes import slot_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine

POLICIES = ("full", "snapkv@32", "streaming_llm@32", "h2o@32", "full+kivi4")
PLAN = BenchPlan(policies=POLICIES, lengths=(64, 128), batches=(1, 3), new_tokens=8, repeats=2)
CACHE = PrefixCacheConfig(block_size=16, min_tokens=1)


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def result(model, told):
    return bench.run(PLAN, model, EngineConfig(step_tokens=48), CACHE, told.append)


def test_every_cell_has_a_row(result):
    assert {(row.policy, row.prompt_tokens) for row in result.prefill} == {(p, n) for p in POLICIES for n in (64, 128)}
    assert len(result.decode) == len(POLICIES) * 2 * 2
    assert {(row.policy, row.prompt_tokens, row.batch) for row in result.decode} == {
        (policy, length, batch) for policy in POLICIES for length in (64, 128) for batch in (1, 3)
    }


def test_every_time_was_taken_as_often_as_asked(result):
    spreads = [spread for row in result.prefill for spread in (row.prefill, row.ttft_cold, row.ttft_warm)]
    spreads += [spread for row in result.decode for spread in (row.tpot, row.hand_off)]
    for spread in spreads:
        assert spread.repeats == PLAN.repeats
        assert 0 < spread.least <= spread.median <= spread.most
    for row in result.decode:
        assert row.tokens_per_second == pytest.approx(row.batch / row.tpot.median)


def test_progress_is_told_of_every_measurement(result, told):
    assert len(told) == bench.measurements(PLAN)


def test_bytes_are_those_that_admission_sets_aside(result, model):
    for row in result.decode:
        spec = budgets.in_force(PolicySpec.model_validate(row.policy), row.prompt_tokens, PLAN.new_tokens)
        shape, new = model.kv_shape, PLAN.new_tokens
        assert row.slot_bytes == row.batch * slot_bytes(spec, shape, row.prompt_tokens, new)
        assert row.full_bytes == row.batch * slot_bytes(PolicySpec(), shape, row.prompt_tokens, new)
        assert row.pool_bytes >= row.slot_bytes
        assert row.kept_tokens == budgets.kept_tokens(spec, row.prompt_tokens)


@pytest.mark.parametrize("policy", ["adakv@32", "snapkv@32+kivi4", "rocketkv@32", "fastgen", "pyramidkv@32", "tova@32"])
def test_bytes_are_those_that_tensors_take(model, policy):
    spec = PolicySpec.model_validate(policy)
    engine = Engine(model, EngineConfig(), CACHE, clock=lambda: 0.0)
    prompt = synthetic.random_prompt(model, spec, synthetic.random_keys_and_values(model, 96, 0))
    kept = sum(float((s.positions >= 0).sum()) for s in compression.build(spec).select(prompt))
    begun = synthetic.begin_decoding(engine, spec, prompt, 3, 8)
    held = sum(tensor.numel() * tensor.element_size() for slab in engine.pool.slabs for tensor in slab.memory.tensors())
    assert held == engine.pool.allocated_bytes >= sum(slot.resident_bytes for slot in begun.slots)
    assert begun.kept == pytest.approx(kept / model.kv_shape.layers / model.kv_shape.kv_heads)
    synthetic.end_all(engine)
    decoded = decoding.decode(engine, spec, prompt, 3, 8)
    assert decoded.pool_bytes == held


def test_a_batch_decodes_to_its_end_and_leaves_nothing(model):
    engine = Engine(model, EngineConfig(), CACHE, clock=lambda: 0.0)
    spec = PolicySpec(name="snapkv", budget=24)
    prompt = synthetic.random_prompt(model, spec, synthetic.random_keys_and_values(model, 64, 0))
    begun = synthetic.begin_decoding(engine, spec, prompt, 2, 8)
    for _ in range(7):
        assert all(slot.tokens > 0 for slot in begun.slots)
        assert engine.step()
    assert not engine.step()
    synthetic.end_all(engine)
    assert engine.pool.allocated_bytes == 0


def test_warm_prompts_were_warm_and_cold_ones_cold(result, model):
    for row in result.prefill:
        spec = budgets.in_force(PolicySpec.model_validate(row.policy), row.prompt_tokens, PLAN.new_tokens)
        recomputed = budgets.recomputed_tokens(spec, row.prompt_tokens)
        assert row.warm_tokens == min(round(ttft.WARM_SHARE * row.prompt_tokens), row.prompt_tokens - recomputed)
        assert row.workspace_bytes >= row.prompt_tokens * model.kv_shape.token_bytes


def test_prompts_may_be_left_out(model):
    plan = BenchPlan(policies=("full",), lengths=(64,), batches=(1,), new_tokens=8, repeats=1, prefill=False)
    told = []
    result = bench.run(plan, model, EngineConfig(), CACHE, told.append)
    assert result.prefill == []
    assert len(result.decode) == 1
    assert len(told) == bench.measurements(plan)


def test_what_the_engine_refuses_is_told(model):
    plan = BenchPlan(policies=("full",), lengths=(400,), batches=(1,), new_tokens=8, repeats=1)
    with pytest.raises(MeasureError, match=r"policy full: the request needs .* engine.kv_bytes is 65536"):
        bench.run(plan, model, EngineConfig(kv_bytes=1 << 16), CACHE, lambda what: None)


def test_a_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert math.isclose(Spread.of([3.0, 1.0, 2.0]).share, 0.5)

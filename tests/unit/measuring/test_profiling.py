"""A profile: every place of the grid measured, every policy fitted, and the file says the same as the value."""

import pytest

from warmkv.config import Config, EngineConfig
from warmkv.measuring import documents, grid, profiling
from warmkv.measuring.plan import MeasureError, ProfilePlan
from warmkv.measuring.profiling import Profiler
from warmkv.simulator.steps import step_profile
from warmkv.simulator.steps.costs import StepCost
from warmkv.simulator.steps.step_profile import PHASES, Measurement

POLICIES = ("full", "snapkv", "h2o", "full+kivi4")
PLAN = ProfilePlan(policies=POLICIES, lengths=(64, 96, 144, 200), batches=(1, 2), repeats=2)
ENGINE = EngineConfig(step_tokens=48)


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def measured(model, told):
    return Profiler(PLAN, model, ENGINE).run(told.append)


def test_every_place_is_measured(measured):
    chunks = [(float(cell.tokens), float(cell.end)) for cell in grid.chunks(PLAN.lengths, 48)]
    for policy in PLAN.specs():
        of = {phase: [m for m in measured if m.phase == phase and policy in m.policies] for phase in PHASES}
        assert [(m.tokens, m.context) for m in of["prefill"]] == chunks
        assert sorted({m.tokens for m in of["decode"]}) == [1, 2]
        assert len(of["decode"]) == len(PLAN.lengths) * len(PLAN.batches)
        assert {m.context for m in of["hand_off"]} == set(PLAN.lengths)
        assert all(0 < m.least <= m.seconds <= m.most for ms in of.values() for m in ms)


def test_the_fit_is_to_the_least_of_the_repeats(measured):
    cost = StepCost(0.001, 2e-5, 3e-7, 4e-8)
    least = [m.model_copy(update={"least": cost.seconds(m.tokens, m.context)}) for m in measured]
    prefill = profiling.fits(least, ["full"])[0].prefill
    assert (prefill.a, prefill.b, prefill.c, prefill.d) == pytest.approx((cost.a, cost.b, cost.c, cost.d), rel=1e-6)


def test_prefill_is_shared_only_by_policies_that_ask_the_same_of_it(measured):
    groups = {m.policies for m in measured if m.phase == "prefill"}
    assert groups == {("full", "snapkv", "full+kivi4"), ("h2o",)}


def test_progress_is_told_of_every_measurement(model, measured, told):
    assert len(told) == Profiler(PLAN, model, ENGINE).measurements


def test_the_file_gives_back_what_was_fitted(measured, model, tmp_path):
    written = documents.profile_document(measured, PLAN, Config(engine=ENGINE), model, {"cpu": "a CPU", "gpu": None})
    file = tmp_path / "folder" / "profile.json"
    step_profile.write(written, file)
    read = step_profile.read(file)
    assert read == written
    assert read.costs() == written.costs()
    assert [policy.policy for policy in read.policies] == list(PLAN.specs())
    assert read.model.matches(model.kv_shape)
    assert read.prefill_chunk == 48
    assert read.versions.keys() >= {"python", "torch", "transformers", "warmkv"}


def test_what_does_not_fit_in_memory_is_left_out(model):
    room = 4 * 200 * model.kv_shape.token_bytes
    small = EngineConfig(step_tokens=48, kv_bytes=room)
    plan = ProfilePlan(policies=("full",), lengths=PLAN.lengths, batches=(1, 8), repeats=1)
    measured = Profiler(plan, model, small).run(lambda what: None)
    assert {m.tokens for m in measured if m.phase == "decode" and m.context > 8 * 150} == set()
    assert {m.tokens for m in measured if m.phase == "decode"} == {1, 8}


def test_chunks_are_no_longer_than_the_longest_prompt(model):
    plan = ProfilePlan(policies=("full",), lengths=PLAN.lengths, batches=(1,), repeats=1)
    measured = Profiler(plan, model, EngineConfig(step_tokens=512)).run(lambda what: None)
    assert {m.tokens for m in measured if m.phase == "prefill"} == {25, 50, 100, 200}


def test_a_grid_that_is_too_small_is_refused_before_it_is_measured(model):
    """By the same count, and of the same steps, as the fit would."""
    plan = ProfilePlan(policies=("full",), lengths=(64, 96, 144), batches=(1, 2), repeats=1)
    profiler = Profiler(plan, model, ENGINE)
    with pytest.raises(MeasureError) as before:
        profiler.check()
    with pytest.raises(MeasureError) as after:
        profiling.fits(profiler.run(lambda what: None), ["full"])
    assert str(before.value) == str(after.value)
    assert "measured steps are too few to fit; take at least" in str(before.value)
    Profiler(PLAN, model, ENGINE).check()


def test_a_grid_that_is_too_small_is_refused(model):
    one = [
        Measurement(policies=("full",), phase=phase, tokens=1, context=64, seconds=1, least=1, most=1)
        for phase in PHASES
    ]
    with pytest.raises(MeasureError, match=r"prefill of full: .* the same tokens. Give more --lengths"):
        profiling.fits(one, ["full"])


@pytest.mark.parametrize("policy", ["adakv", "cake", "fastgen", "adaptive", "rocketkv", "tova", "expected_attention"])
def test_policies_of_every_shape_can_be_profiled(model, policy):
    plan = ProfilePlan(policies=(policy,), lengths=(96, 130, 180, 240), batches=(1, 2), repeats=1)
    measured = Profiler(plan, model, ENGINE).run(lambda what: None)
    (fitted,) = profiling.fits(measured, plan.specs())
    assert fitted.policy == policy
    assert fitted.kind.method == policy

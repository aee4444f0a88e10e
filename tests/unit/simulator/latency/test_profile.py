"""Replays with measured step times: every second is one that the profile promises."""

from dataclasses import replace

import pytest

from tests.unit.simulator.conversations import config, record, run
from tests.unit.simulator.steps.test_step_profile import profile
from warmkv.policy_spec import PolicySpec
from warmkv.simulator.steps import step_profile
from warmkv.simulator.steps.costs import StepCost, batch_seconds
from warmkv.simulator.studies.replays import step_times
from warmkv.simulator.studies.replays.replay import Variant, recorded_policy, replay

FULL = ((2**-6, 2**-10, 2**-14, 2**-16), (2**-5, 2**-9, 2**-13), (2**-8, 2**-12, 2**-15))
SNAP = ((2**-6, 2**-10, 2**-14, 2**-16), (2**-4, 2**-8, 2**-12), (2**-7, 2**-11, 2**-14))
CHUNK = 8  # of the small service


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "profile.json"
    step_profile.write(profile(full=FULL, snapkv=SNAP), file)
    return config(f"simulator.profile={file}")


def times_of(settings):
    return step_times.choose_cost([], settings, recorded_policy())[0]


@pytest.mark.parametrize(("policy", "costs", "kept"), [("full", FULL, 20), ("snapkv@6", SNAP, 6)])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_request_alone_takes_exactly_the_promised_seconds(settings, policy, costs, kept, fast_forward):
    prefill, decode, hand_off = (StepCost(*values) for values in costs)
    (job,), _ = run(
        [record(0.0, list(range(20)), output=11, policy=policy)],
        settings,
        cost=times_of(settings),
        fast_forward=fast_forward,
    )
    chunks = prefill.seconds(CHUNK, 8) + prefill.seconds(CHUNK, 16) + prefill.seconds(4, 20)
    assert job.first == chunks + hand_off.seconds(kept, 20)
    assert job.finished - job.first == sum(decode.seconds(1, kept + step) for step in range(1, 11))


def test_a_request_without_a_slot_is_not_handed_off(settings):
    (job,), _ = run([record(0.0, [1] * 8, output=1)], settings, cost=times_of(settings))
    assert job.first == job.finished == StepCost(*FULL[0]).seconds(8, 8)


def test_policies_that_decode_together_share_an_empty_step(settings):
    records = [
        record(0.0, [1] * 8, output=200, policy="full", name="full"),
        record(0.0, [2] * 12, output=200, policy="snapkv@6", name="snapkv"),
    ]
    (full, snap), _ = run(records, settings, cost=times_of(settings))
    (again_full, again_snap), _ = run(records, settings, cost=times_of(settings), fast_forward=False)
    assert (full.finished, snap.finished) == (again_full.finished, again_snap.finished)
    # The first decodes once after its own chunk and once between the other's two; from then on both decode.
    together = (
        batch_seconds([(StepCost(*FULL[1]), 1, 8 + 2 + step), (StepCost(*SNAP[1]), 1, 6 + step)])
        for step in range(1, 199 - 2 + 1)
    )
    assert full.finished - snap.first == sum(together)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_request_that_ends_before_its_slot_is_full_takes_only_its_own_entries_away(fast_forward):
    cost = StepCost(2**-6, 2**-10, 2**-13)
    records = [
        record(0.0, [1] * 8, output=50, name="late"),
        replace(record(0.0, [2] * 8, output=3, name="early"), max_tokens=100),
    ]
    (late, early), _ = run(records, config(), cost=cost, fast_forward=fast_forward)
    alone = (cost.seconds(1, 8 + step) for step in range(5, 50))  # two beside the prompt of the other, two with it
    assert late.finished - early.finished == sum(alone)


def test_the_source_names_file_machine_and_error(settings):
    times, source = step_times.choose_cost([], settings, recorded_policy())
    assert source == (
        f"measured, {settings.simulator.profile} (small on a CPU, mean error out of sample prefill 5%, decode 5%)"
    )
    assert set(times.figures()) == {"full", "snapkv"}
    assert step_times.choose_cost([], settings, recorded_policy(), "config")[1] == source
    with pytest.raises(ValueError, match="no record of the log carries timings"):
        step_times.choose_cost([], settings, recorded_policy(), "log")


def test_another_model_is_told(settings):
    other = config(f"simulator.profile={settings.simulator.profile}", "simulator.model.layers=2")
    assert step_times.choose_cost([], other, recorded_policy())[1].endswith("KV shape is not that of simulator.model")


def test_policies_that_were_not_measured_are_named(settings):
    asked = [PolicySpec.model_validate(policy) for policy in ("full", "snapkv@0.2", "window@0.2", "window@0.5")]
    assert step_times.stand_ins(times_of(settings), asked) == ["window gets the times of snapkv"]
    assert step_times.stand_ins(StepCost(1, 1, 1), asked) == []


def test_variants_of_a_replay_have_the_times_of_their_policy(settings):
    records = [record(float(10 * n), [n] * 40, output=30) for n in range(3)]
    variants = [Variant(policy=PolicySpec.model_validate(policy)) for policy in ("full", "snapkv@4")]
    full, snap = replay(records, settings, variants, times_of(settings))
    assert full.ttft.p50 > snap.ttft.p50  # the same prefill, fewer entries to hand off
    assert full.tpot.p50 < snap.tpot.p50

"""What is measured: read from the command line, and refused before anything is loaded."""

from itertools import pairwise

import pytest

from warmkv.measuring import plan as plans
from warmkv.measuring.plan import PROFILED_TOKENS, BenchPlan, MeasureError, ProfilePlan
from warmkv.policies.memory_plan import Limit
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import split_policies


def test_a_list_of_policies_may_hold_knobs():
    assert split_policies("full, snapkv@0.2:window=16,kernel=7 ,h2o@64") == (
        "full",
        "snapkv@0.2:window=16,kernel=7",
        "h2o@64",
    )


def test_given_beats_quick_beats_default():
    plan = plans.make(BenchPlan, plans.QUICK_BENCH, {"repeats": 9, "lengths": None})
    assert plan.repeats == 9
    assert plan.lengths == plans.QUICK_BENCH["lengths"]
    assert plan.seed == BenchPlan().seed


def test_the_same_policy_is_measured_once():
    assert list(BenchPlan(policies=("full", "snapkv@64", "snapkv@64", "kivi")).specs()) == [
        "full",
        "snapkv@64",
        "full+kivi4:residual=128",
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BenchPlan(policies=("magic",)), "policy magic: there are adakv, .*, window, and full"),
        (lambda: BenchPlan(policies=("snapkv@1",)), "policy snapkv@1: a budget in tokens must be at least 2"),
        (lambda: BenchPlan(policies=()), "name a policy"),
        (lambda: BenchPlan(lengths=()), "at least 16, got none"),
        (lambda: BenchPlan(lengths=(8,)), "at least 16, got 8"),
        (lambda: BenchPlan(batches=(0,)), "batches are numbers of sequences, got 0"),
        (lambda: BenchPlan(new_tokens=4), "--new-tokens must be at least 8"),
        (lambda: BenchPlan(repeats=0), "--repeats must be at least 1"),
        (lambda: plans.split_numbers("--lengths", "1,many"), "--lengths 1,many: write whole numbers"),
        (lambda: ProfilePlan(policies=("auto",)), "auto stands for other policies"),
        (lambda: ProfilePlan(policies=("snapkv@0.2",)), "leave the budget out"),
        (lambda: BenchPlan(lengths=(1000,)).check(1024, "tiny"), "tiny takes 1024 tokens: .* go up to 992, got 1000"),
        (lambda: ProfilePlan(lengths=(1020,)).on(1024, "tiny"), "lengths go up to 1008, got 1020"),
        (
            lambda: BenchPlan(lengths=(1024,)).check_memory(KVShape(2, 2, 8, 4), Limit(1 << 20, False)),
            "8 sequences of 1024 tokens under full need .* bytes, engine.kv_bytes is 1,048,576",
        ),
    ],
)
def test_what_cannot_be_measured_says_why(make, says):
    with pytest.raises(MeasureError, match=says):
        make()


def test_a_profile_spreads_its_contexts_over_the_model():
    lengths = ProfilePlan().on(4096, "tiny").lengths
    assert len(lengths) == ProfilePlan().points
    assert lengths[-1] == 4096 - PROFILED_TOKENS
    ratios = [after / before for before, after in pairwise(lengths)]
    assert max(ratios) == pytest.approx(min(ratios), rel=0.02)
    assert ProfilePlan(lengths=(64, 128)).on(4096, "tiny").lengths == (64, 128)

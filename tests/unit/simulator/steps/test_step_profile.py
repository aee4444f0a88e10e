"""The file of measured step times, and which of them a policy gets."""

import json

import pytest

from warmkv.policy_spec import PolicySpec
from warmkv.simulator.steps import step_profile
from warmkv.simulator.steps.costs import MeasuredCosts, PhaseCosts, StepCost, StepKind, batch_seconds
from warmkv.simulator.steps.step_profile import ErrorOfFit, FittedCost, PolicyProfile, ProfileError, StepProfile

EXACTLY = ErrorOfFit(mean=0.0, p95=0.0)


def fitted(a, b, c, d=0.0):
    return FittedCost(a=a, b=b, c=c, d=d, points=9, in_sample=EXACTLY, out_of_sample=ErrorOfFit(mean=0.05, p95=0.1))


def profile(**policies):
    """A profile with (prefill, decode, hand_off) coefficients of policies."""
    return StepProfile(
        machine={"cpu": "a CPU", "gpu": None},
        versions={},
        commit=None,
        model={"name": "small", "layers": 1, "kv_heads": 1, "head_dim": 1, "dtype_bytes": 1},
        prefill_chunk=8,
        policies=tuple(
            PolicyProfile(policy=name, prefill=fitted(*p), decode=fitted(*d), hand_off=fitted(*h))
            for name, (p, d, h) in policies.items()
        ),
    )


ONE = profile(full=((1, 2, 3, 4), (5, 6, 7), (8, 9, 10)))


def kind(policy):
    return StepKind.of(PolicySpec.model_validate(policy))


def test_a_file_gives_the_costs_that_were_written(tmp_path):
    file = tmp_path / "new" / "profile.json"
    step_profile.write(ONE, file)
    costs = step_profile.read(file).costs()
    assert costs.of(kind("full")) == PhaseCosts(StepCost(1, 2, 3, 4), StepCost(5, 6, 7), StepCost(8, 9, 10))
    assert costs.figures()["full"]["prefill"] == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 0}
    assert ONE.summary == "small on a CPU, mean error out of sample prefill 5%, decode 5%"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tree: tree.update(format=2), "format: Input should be 1"),
        (lambda tree: tree.update(policies=[]), "policies: "),
        (lambda tree: tree["policies"][0].update(policy="magic"), "policies.0.policy.name: "),
        (lambda tree: tree["policies"][0]["decode"].update(c=-1), "policies.0.decode.c: .*greater than or equal to 0"),
        (lambda tree: tree["policies"][0]["decode"].update(e=1), "policies.0.decode.e: unknown key"),
        (lambda tree: tree.pop("machine"), "machine: Field required"),
    ],
)
def test_a_wrong_file_says_where(tmp_path, change, says):
    tree = ONE.model_dump(mode="json")
    change(tree)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(tree))
    with pytest.raises(ProfileError, match=rf"profile.json is not a profile of `warmkv profile`: {says}"):
        step_profile.read(file)


def test_what_is_no_file_or_no_json_is_told(tmp_path):
    with pytest.raises(ProfileError, match=r"cannot read .*absent: No such file"):
        step_profile.read(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ProfileError, match="is not a profile"):
        step_profile.read(tmp_path / "text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="not UTF-8"):
        step_profile.read(tmp_path / "bytes")


@pytest.mark.parametrize(
    "policy", ["full", "snapkv", "h2o", "snapkv+ring", "full+kivi4", "snapkv+argmin+fp8", "fastgen"]
)
def test_the_label_of_a_kind_names_it(policy):
    assert kind(policy).label == policy
    assert kind(kind(policy).label) == kind(policy)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("full", "full"),
        ("snapkv@0.2", "snapkv"),
        ("snapkv@512:window=16", "snapkv"),
        ("pyramidkv", "snapkv"),  # appends in the model's dtype, and selects
        ("window", "streaming_llm"),  # a ring
        ("snapkv+ring", "streaming_llm"),
        ("tova", "snapkv"),  # no argmin was measured: appending and ring are as far, and nobody shares the method
        ("snapkv+kivi4", "full+kivi4"),
        ("full+kivi2", "full"),  # no such storage
    ],
)
def test_a_kind_that_was_not_measured_gets_the_nearest(asked, given):
    costs = PhaseCosts(StepCost(1, 1, 1), StepCost(1, 1, 1))
    measured = MeasuredCosts({kind(p): costs for p in ("full", "snapkv", "streaming_llm", "full+kivi4")})
    assert measured.nearest(kind(asked)).label == given
    assert measured.of(kind(asked)) is costs


def test_a_mixed_batch_pays_for_an_empty_step_once():
    light, heavy = StepCost(1.0, 0.5, 0.25), StepCost(2.0, 4.0, 8.0)
    assert batch_seconds([(light, 2, 10)]) == light.seconds(2, 10)
    assert batch_seconds([(light, 2, 10), (heavy, 1, 3)]) == 2.0 + light.load(2, 10) + heavy.load(1, 3)
    assert StepCost(1, 2, 3, 4).seconds(5, 7) == 1 + 2 * 5 + 3 * 7 + 4 * 5 * 7


def test_disturbance_is_how_far_the_median_lies_above_the_least():
    places = [
        step_profile.Measurement(
            policies=("full",), phase="decode", tokens=1, context=1, seconds=seconds, least=1.0, most=3.0
        )
        for seconds in (1.0, 1.5)
    ]
    assert ONE.disturbance == 0.0
    assert ONE.model_copy(update={"measurements": tuple(places)}).disturbance == 0.25

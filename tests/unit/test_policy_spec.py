"""One line of configuration: what it reads as, what it is written as, and what is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from warmkv.policies.compression import build
from warmkv.policy_spec import METHODS, STORAGES, DecodeRule, PolicySpec


@pytest.mark.parametrize(
    ("short", "tree"),
    [
        ("full", {}),
        ("snapkv@1024+ring+kivi4", {"name": "snapkv", "budget": 1024, "decode": "ring", "storage": "kivi4"}),
        ("snapkv@0.2:window=16", {"name": "snapkv", "budget": 0.2, "window": 16}),
        ("h2o@0.1+protect", {"name": "h2o", "budget": 0.1, "protect": 0.1}),
        ("snapkv@0.2+shots+turbo3", {"name": "snapkv", "budget": 0.2, "shots": True, "storage": "turbo3"}),
        ("kivi", {"storage": "kivi4", "residual": 128}),
        ("kivi:bits=2,residual=64", {"storage": "kivi2", "residual": 64}),
        ("full+kivi4", {"storage": "kivi4", "residual": 32}),
        ("turboquant:bits=3", {"storage": "turbo3"}),
        ("fp8", {"storage": "fp8"}),
        ("structural@0.1", {"name": "snapkv", "budget": 0.1, "protect": 0.1}),
        ("structural@0.1:inner=h2o,protect=0.2", {"name": "h2o", "budget": 0.1, "protect": 0.2}),
        ("shotkv@0.3", {"name": "snapkv", "budget": 0.3, "shots": True}),
        ("h2o@0.5+append", {"name": "h2o", "budget": 0.5, "decode": "append"}),
    ],
)
def test_a_short_form_reads_as_its_tree(short, tree):
    assert PolicySpec.model_validate(short) == PolicySpec(**tree)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_built_with_its_defaults(name):
    spec = PolicySpec(name=name)
    assert build(name).spec == spec == PolicySpec.model_validate(spec.label)
    assert all(getattr(spec, knob.name) == knob.default for knob in METHODS[name].knobs)


@st.composite
def trees(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(list(METHODS)))
    budget = draw(st.one_of(st.integers(10, 5000), st.integers(1, 1000).map(lambda n: n / 1000)))
    return {
        "name": name,
        "budget": budget if METHODS[name].has_budget else 1.0,
        "decode": draw(st.sampled_from([*get_args(DecodeRule), None])),
        "storage": draw(st.sampled_from(list(STORAGES))),
        "protect": draw(st.sampled_from([0.0, 0.1, 0.25])),
        "shots": draw(st.booleans()),
        "residual": draw(st.sampled_from([32, 64])),
        "window": draw(st.sampled_from([None, 8])),
        "sinks": draw(st.sampled_from([None, 2])),
        "heavy": draw(st.sampled_from([None, 0.25])),
    }


@given(trees())
def test_what_is_accepted_reads_back_from_its_label_and_from_its_json(tree):
    try:
        spec = PolicySpec(**tree)
    except ValidationError:
        return
    assert PolicySpec.model_validate(spec.label) == spec
    assert PolicySpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("short", "message"),
    [
        ("snapkv@lots", "write NAME@TOKENS or NAME@SHARE"),
        ("snapkv@10+fast", "write NAME@TOKENS or NAME@SHARE"),
        ("snapkv@10:window", "write NAME@TOKENS or NAME@SHARE"),
        (
            "snapkv@10:sinks=4",
            "sinks is a knob of expected_attention, streaming_llm, any ring; snapkv",
        ),
        ("full@0.5", "full has no budget"),
        ("full+ring", "full only appends"),
        ("rocketkv@0.2+kivi4", "rocketkv goes with storage model, got kivi4"),
        ("rocketkv@0.2+argmin", "rocketkv only appends"),
        ("window@10+protect", "window has no scores"),
        ("adakv@10+shots", "keeps the same units in all heads"),
        ("streaming_llm@4", "leaves no recent token beside 4 sinks"),
        ("snapkv@3+ring", "leaves no recent token beside 4 sinks"),
        ("kivi:bits=3", "bits of kivi must be one of"),
        ("kivi+fp8", "kivi is a storage itself"),
        ("snapkv@10+kivi4+fp8", "write NAME@TOKENS or NAME@SHARE"),
        ("snapkv@10+fp8:residual=64", "residual is a knob of kivi2 and kivi4"),
        ("streaming_llm@20+append", "streaming_llm is a ring"),
        ("window@20+argmin", "window is a ring"),
        ("snapkv@10+kivi4:residual=40", "multiple of 32"),
        ("magic@3", "name"),
        ({"name": []}, "name"),
        ({"name": {}}, "name"),
        ({"name": "cake", "gamma": float("inf")}, "finite"),
        ("snapkv@0.2:budget=5", "write NAME@TOKENS or NAME@SHARE"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(short, message):
    with pytest.raises(ValidationError, match=message):
        PolicySpec.model_validate(short)

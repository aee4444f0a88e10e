"""What changed between two runs, by hand."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.config import load
from warmkv.simulator.studies.sweeps.compare import ComparedRun, CompareError, compare, read

FIGURES = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.just(0.0) | st.none()


def folder(path, figures, meta=None):
    path.mkdir()
    (path / "summary.json").write_text(json.dumps(figures))
    if meta is not None:
        (path / "meta.json").write_text(json.dumps(meta))
    return str(path)


def test_effects_come_largest_first_and_say_which_way_is_better():
    a = ComparedRun(
        "a", {}, {"dollars": 10.0, "hit_rate_tokens": 0.2, "ttft_p99": 1.0, "evictions": 0.0, "requests": 5.0}
    )
    b = ComparedRun(
        "b", {}, {"dollars": 9.0, "hit_rate_tokens": 0.5, "ttft_p99": 0.5, "evictions": 7.0, "requests": 6.0}
    )
    found = compare(a, b).effects
    assert [(effect.name, effect.better) for effect in found] == [
        ("evictions", False),
        ("hit_rate_tokens", True),
        ("ttft_p99", True),
        ("requests", None),
        ("dollars", True),
    ]
    assert [effect.change for effect in found] == [None, *map(pytest.approx, (1.5, -0.5, 0.2, -0.1))]


def test_a_run_that_served_nothing_is_neither_cheaper_nor_faster(tmp_path):
    none = folder(tmp_path / "none", {"requests": 2, "refused": 2, "dollars": 0.0, "e2e_p99": 0.0, "slot_bytes_max": 0})
    some = folder(tmp_path / "some", {"requests": 2, "refused": 0, "dollars": 1.0, "e2e_p99": 0.5, "slot_bytes_max": 9})
    found = compare(read(none), read(some))
    assert {effect.name for effect in found.effects} == {"requests", "refused"}
    assert (found.only_a, found.only_b) == ([], ["dollars", "e2e_p99", "slot_bytes_max"])


@given(
    st.dictionaries(st.sampled_from("abcde"), FIGURES),
    st.dictionaries(st.sampled_from("abcde"), FIGURES),
)
def test_both_ways_tell_the_same(a, b):
    there = compare(ComparedRun("a", {}, a), ComparedRun("b", {}, b))
    back = compare(ComparedRun("b", {}, b), ComparedRun("a", {}, a))
    assert (there.only_a, there.only_b) == (back.only_b, back.only_a)
    mirrored = {effect.name: (effect.b, effect.a, effect.better) for effect in back.effects}
    for effect in there.effects:
        x, y, better = mirrored[effect.name]
        assert (effect.a, effect.b) == (x, y)
        assert effect.better is (None if better is None else not better)
        assert (effect.better is None) == (effect.a == effect.b)
    names = [*there.only_a, *there.only_b, *(effect.name for effect in there.effects)]
    assert sorted(names) == sorted({name for run in (a, b) for name, value in run.items() if value is not None})
    json.dumps(there.to_json(), allow_nan=False)


def test_what_only_one_run_knows_is_told_apart():
    result = compare(
        ComparedRun("a", {}, {"quality": None, "x": 1.0}), ComparedRun("b", {}, {"quality": 0.9, "y": 1.0})
    )
    assert (result.effects, result.only_a, result.only_b) == ([], ["x"], ["quality", "y"])


def test_settings_differ_by_path_and_policies_by_their_short_form(tmp_path):
    def meta(*flags):
        return {"config": load(flags=flags, environ={}).model_dump(mode="json"), "trace": {"name": "t"}}

    a = folder(tmp_path / "a", {"dollars": 1}, meta())
    b = folder(
        tmp_path / "b", {"dollars": 1}, meta("compression.policy=h2o@64", "prefix_cache.ttls.5m=60")
    )  # names the only TTL
    result = compare(read(a), read(b))
    assert result.settings == {
        "compression.policy": ("full", "h2o@64"),
        "prefix_cache.ttls.5m": (300.0, 60.0),
        "prefix_cache.ttls.1h": (3600.0, None),
    }
    assert compare(read(a), read(a)).settings == {}


def test_numbers_that_are_none_are_unknown(tmp_path):
    run = folder(tmp_path / "a", {"dollars": math.nan, "quality": None, "requests": 3})
    assert read(run).figures == {"dollars": None, "quality": None, "requests": 3.0}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"dollars": "ten"}', "dollars is no number: 'ten'"),
        ('{"dollars": true}', "dollars is no number"),
        ('{"dollars": {"total": 1}}', "dollars is no number"),
        ("[1]", "expected a mapping"),
        ("{", "is not JSON"),
    ],
)
def test_a_summary_that_cannot_be_compared_is_refused(tmp_path, content, says):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(CompareError, match=says):
        read(str(tmp_path))


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(CompareError, match=r"is no run: it has no summary\.json"):
        read(str(tmp_path))
    (tmp_path / "results.json").write_text('{"points": [{"key": "k", "figures": {}}, {"key": "l", "figures": {}}]}')
    for wrong in (tmp_path, f"{tmp_path}:0", f"{tmp_path}:3"):
        with pytest.raises(CompareError, match="has points 1 to 2; write"):
            read(str(wrong))
    with pytest.raises(CompareError, match=r"cannot read .*k.json"):
        read(f"{tmp_path}:1")
    with pytest.raises(CompareError, match="is no point of a sweep"):
        read(str(tmp_path / "results.json"))

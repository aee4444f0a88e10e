"""Searching: limits as they are written, and what is found against trying everything."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from warmkv.cli import app
from warmkv.config import load
from warmkv.simulator.studies.sweeps.tune import (
    Trial,
    TuneConstraint,
    TuneError,
    best_of,
    constraints_of,
    improves,
    nearest_of,
    refusing_no_more,
    search,
)

KNOWN = ["dollars", "ttft_p99", "quality"]


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_limits_are_read_strictly():
    found = constraints_of("ttft_p99 < 2, quality>=0.95,dollars<1e3", KNOWN)
    assert found == [
        TuneConstraint("ttft_p99", "<", 2.0),
        TuneConstraint("quality", ">=", 0.95),
        TuneConstraint("dollars", "<", 1000.0),
    ]
    assert constraints_of("", KNOWN) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft_p99", "write FIGURE<NUMBER"),
        ("ttft_p99<", "write FIGURE<NUMBER"),
        ("ttft_p99<2s", "write FIGURE<NUMBER"),
        ("ttft_p99=2", "write FIGURE<NUMBER"),
        ("1<ttft_p99<2", "write FIGURE<NUMBER"),
        ("ttft_p99<1.2.3", "write FIGURE<NUMBER"),
        ("ttft_p9<2", "did you mean 'ttft_p99'?"),
        ("beauty<2", "there are dollars"),
    ],
)
def test_a_limit_that_is_none_is_refused(text, says):
    with pytest.raises(TuneError) as error:
        constraints_of(text, KNOWN)
    assert says in str(error.value)


def test_a_limit_is_met_on_its_side_and_never_by_the_unknown():
    for sign, met in [("<", (True, False, False)), ("<=", (True, True, False)), (">", (False, False, True))]:
        limit = TuneConstraint("x", sign, 2.0)
        assert tuple(limit.met({"x": value}) for value in (1.0, 2.0, 3.0)) == met
        assert not limit.met({"x": None})
        assert limit.excess({"x": None}) > 1e6
    assert TuneConstraint("x", ">", 2.0).excess({"x": 1.0}) == 0.5
    assert TuneConstraint("x", "<", 0.0).excess({"x": 3.0}) == 3.0


AXES = {"a": list(range(12)), "b": list(range(12)), "kind": ["slow", "fast", "wrong"]}


def bowl(choices):
    """Least cost at (7, 3, fast), where time is short enough only for larger `a`."""
    cost = {"slow": 3.0, "fast": 0.0, "wrong": 0.0}
    return [
        {
            "cost": (one["a"] - 7) ** 2 + (one["b"] - 3) ** 2 + cost[one["kind"]],
            "time": 10.0 - one["a"],
            "quality": None if one["kind"] == "wrong" else 1.0,
        }
        for one in choices
    ]


LIMITS = [TuneConstraint("time", "<", 2.5), TuneConstraint("quality", ">", 0.5)]


def test_a_small_space_is_tried_in_full():
    axes = {"a": [1, 8, 9], "kind": ["slow", "fast"], "b": [3]}
    found = search(axes, bowl, "cost", LIMITS, trials=6, seed=0)
    assert [trial.settings for trial in found] == [
        dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
    ]
    best = best_of(found, "cost")
    assert best is not None
    assert best.settings == {"a": 8, "kind": "fast", "b": 3}
    assert (
        best_of(search({"a": [1]} | {"kind": ["fast"], "b": [3]}, bowl, "cost", LIMITS, trials=6, seed=0), "cost")
        is None
    )


def test_what_comes_nearest_is_known_where_nothing_is_within():
    found = search({"a": [1, 5, 3], "b": [3], "kind": ["slow"]}, bowl, "cost", LIMITS, trials=9, seed=0)
    assert best_of(found, "cost") is None
    assert nearest_of(found).settings["a"] == 5


def test_a_large_space_is_searched_better_than_by_chance():
    pytest.importorskip("optuna")
    calls = []

    def told(choices):
        calls.append(list(choices))
        return bowl(choices)

    found = search(AXES, told, "cost", LIMITS, trials=60, seed=1)
    assert len(found) == 60 == sum(map(len, calls))
    assert len({json.dumps(trial.settings) for trial in found}) == 60
    best = best_of(found, "cost")
    assert best is not None
    everything = bowl([dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())])
    allowed = sorted(f["cost"] for f in everything if all(limit.met(f) for limit in LIMITS))
    assert best.figures["cost"] == allowed[0]
    assert search(AXES, bowl, "cost", LIMITS, trials=60, seed=1) == found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    done = call("workload", "--sessions", 8, "--hours", 0.1, "--length-scale", 0.3, "--out", folder / "log.jsonl")
    assert done.exit_code == 0, done.output
    (folder / "space.yaml").write_text("{prefix_cache.memory_bytes: [0, 1MiB, 1GiB], engine.max_slots: [1, 16]}")
    return folder


def tune(files, *options):
    common = ["--grid", files / "space.yaml", "--workers", 1, "--out", files / "run"]
    return call("tune", files / "log.jsonl", *common, *options)


def test_the_configuration_is_printed_and_can_be_applied(files, tmp_path):
    options = ["--minimize", "resident_bytes_max", "--subject-to", "hit_rate_tokens>0.01"]
    result = tune(files, *options)
    assert result.exit_code == 0, result.output
    assert "tried 6 of 6 choices" in result.stdout
    text = result.stdout[result.stdout.index("prefix_cache:") : result.stdout.index("To apply it")]
    (tmp_path / "warmkv.yaml").write_text(text)
    settings = load(tmp_path / "warmkv.yaml", environ={})
    assert settings.prefix_cache.memory_bytes == 1 << 20
    document = json.loads(tune(files, *options, "--json", "-").stdout)
    within = [trial for trial in document["trials"] if trial["figures"]["hit_rate_tokens"] > 0.01]
    assert [trial["met"] for trial in document["trials"]].count(True) == len(within) > 0
    least = min(trial["figures"]["resident_bytes_max"] for trial in within)
    assert document["best"]["figures"]["resident_bytes_max"] == least
    assert yaml.safe_load(text)["prefix_cache"]["memory_bytes"] == "1MiB"


def test_limits_that_nothing_meets_end_with_1_and_the_nearest(files):
    result = tune(files, "--minimize", "dollars", "--subject-to", "quality>0.9,ttft_p99<100")
    assert result.exit_code == 1
    assert "none is within the limits (quality>0.9, ttft_p99<100, refused<=0)" in result.stdout
    assert "quality>0.9 cannot be checked: no measured results of its policy were given (--quality)" in result.stdout
    assert "To apply it" not in result.stdout


def test_what_refuses_requests_does_not_win_by_it(files):
    """A slot of 1 MiB holds none of the prompts: nothing is billed."""
    space = files / "small.yaml"
    space.write_text("engine.kv_bytes: [1MiB, 1GiB]")
    options = ["--grid", space, "--out", files / "small", "--minimize", "dollars"]
    found = call("tune", files / "log.jsonl", "--workers", 1, *options)
    assert found.exit_code == 0, found.output
    assert "the present settings are as good" in found.stdout
    assert "To apply it" not in found.stdout
    document = json.loads(call("tune", files / "log.jsonl", "--workers", 1, *options, "--json", "-").stdout)
    least, most = sorted(trial["figures"]["dollars"] for trial in document["trials"])
    assert least < most == document["best"]["figures"]["dollars"]
    assert not document["improves"]
    allowed = call("tune", files / "log.jsonl", "--workers", 1, *options, "--subject-to", "refused<1000")
    assert "engine:\n  kv_bytes: 1MiB" in allowed.stdout


def test_present_settings_that_serve_nothing_are_told_and_beaten_by_any_that_do(files):
    space = files / "some.yaml"
    space.write_text("engine.max_slots: [1, 2]")
    options = ["--workers", 1, "--grid", space, "--out", files / "none", "--minimize", "dollars"]
    found = call("tune", files / "log.jsonl", *options, "--set", "engine.max_context=16")
    assert found.exit_code == 1
    assert "under the present settings no request is served" in found.stdout
    assert "as good as" not in found.stdout
    space.write_text("engine.max_context: [16, 100000]")
    found = call("tune", files / "log.jsonl", *options, "--set", "engine.max_context=16", "--out", files / "any")
    assert found.exit_code == 0, found.output
    assert "max_context: 100000" in found.stdout


def test_choices_that_do_not_fit_the_gpu_are_told_and_not_chosen(files, tmp_path):
    sizes = "layers: 32, hidden: 4096, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 14336, vocabulary: 128256"
    (tmp_path / "space.yaml").write_text("engine.max_slots: [16, 512]")
    machine = [
        "--set",
        f"simulator.model={{{sizes}, dtype_bytes: 2}}",
        "--set",
        "simulator.gpu={name: L4, memory: 22.0e9}",
    ]
    options = ["--grid", tmp_path / "space.yaml", "--minimize", "ttft_p99", "--out", tmp_path / "run", "--workers", 1]
    for _ in range(2):  # the second goes on with what is there
        found = call("tune", files / "log.jsonl", *options, *machine)
        assert found.exit_code == 0, found.output
        assert "not replayed, max_slots 512: the model does not fit the memory of a replica" in found.stdout
        assert "tried 2 of 2 choices" in found.stdout


def test_limits_on_refusals_are_added_unless_they_are_asked_about():
    before = {"refused": 3.0, "cost": 1.0}
    assert refusing_no_more([], "cost", before) == [TuneConstraint("refused", "<=", 3.0)]
    assert refusing_no_more([], "refused", before) == []
    assert refusing_no_more([TuneConstraint("refused", "<", 9.0)], "cost", before) == [
        TuneConstraint("refused", "<", 9)
    ]


def test_only_less_than_now_is_an_improvement_if_now_is_within_the_limits():
    trial = Trial({"a": 1}, {"cost": 2.0, "time": 1.0}, met=True, excess=0.0)
    limits = [TuneConstraint("time", "<", 2.0)]
    assert improves(trial, {"cost": 3.0, "time": 1.0}, "cost", limits)
    assert not improves(trial, {"cost": 2.0, "time": 1.0}, "cost", limits)
    assert improves(trial, {"cost": 1.0, "time": 5.0}, "cost", limits)
    assert not improves(replace(trial, met=False), {"cost": 3.0, "time": 1.0}, "cost", limits)


@pytest.mark.parametrize(
    ("space", "options", "says"),
    [
        ("ttl: [5m]", ["--minimize", "dollars"], "ttl: it is no setting of the service"),
        ("simulator.step_a: [1]", ["--minimize", "dollars"], "describes the machine"),
        ("[{}]", ["--minimize", "dollars"], "write a mapping of paths to choices"),
        ("engine.max_slot: [1]", ["--minimize", "dollars"], "did you mean 'max_slots'?"),
        ("engine.max_slots: [1]", ["--minimize", "dollar"], "did you mean 'dollars'?"),
        ("engine.max_slots: [1]", ["--minimize", "dollars", "--subject-to", "ttft"], "write FIGURE<NUMBER"),
    ],
)
def test_what_is_wrong_is_said(files, tmp_path, space, options, says):
    (tmp_path / "space.yaml").write_text(space)
    result = call("tune", files / "log.jsonl", "--grid", tmp_path / "space.yaml", "--out", tmp_path / "run", *options)
    assert result.exit_code == 2, result.output
    assert says in result.stderr.replace("\n", " ")

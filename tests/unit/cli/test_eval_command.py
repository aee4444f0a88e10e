"""`warmkv eval` as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.html import Page
from warmkv.cli import app
from warmkv.evaluation import tasks
from warmkv.evaluation.plan import EvalError, EvalPlan, make
from warmkv.policy_spec import split_policies

SMALL = ["--lengths", "256", "--depths", "0.5", "--samples", "1", "--budgets", "0.4,0.2"]


def call(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of the model in the package with every chart."""
    out = tmp_path_factory.mktemp("eval") / "run"
    tasks = ["--tasks", "needle,code,stream", "--stream-tokens", "512"]
    arguments = [*SMALL, *tasks, "--policies", "snapkv,full+kivi4", "--out", out]
    return out, arguments, call(*arguments)


def test_help_has_an_example_and_needs_no_torch():
    code = "import sys, warmkv.cli; assert not {'torch', 'pyarrow', 'matplotlib'} & set(sys.modules), 'too much'"
    subprocess.run([sys.executable, "-c", code], check=True)
    result = call("--help")
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert all(name in result.output for name in ("--quick", "--budgets", "--stream-tokens"))


def test_the_table_and_the_files(done):
    out, _, result = done
    assert result.exit_code == 0, result.output
    for text in (
        "as it is",
        "snapkv",
        "full+kivi4: cannot reach",
        "40%",
        "needle",
        "recomputed window",
        "last quarter",
    ):
        assert text in result.stdout
    assert "…" not in result.stdout
    rows = pq.read_table(out / "results.parquet").to_pylist()
    assert {row["policy"] for row in rows} == {"full", "snapkv", "full+kivi4"}
    summary = json.loads((out / "summary.json").read_text())
    assert {item["policy"] for item in summary["policies"]} == {"full", "snapkv", "full+kivi4"}
    (full,) = [item for item in summary["policies"] if item["policy"] == "full"]
    assert full["tasks"]["needle"]["score"] == 1.0  # the model in the package can do it


def test_the_same_again_computes_nothing_and_json_prints_only_the_summary(done):
    out, arguments, _ = done
    before = (out / "results.parquet").read_bytes()
    result = call(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((out / "summary.json").read_text())
    assert (out / "results.parquet").read_bytes() == before


def test_other_settings_in_the_same_folder_are_refused(done):
    _, arguments, _ = done
    result = call(*arguments, "--seed", 9)
    assert result.exit_code == 2
    assert "settings.seed: 0 there, 9 here" in result.stderr


def test_the_report_holds_every_chart_and_needs_no_network(done):
    out, _, _ = done
    html = (out / "report.html").read_text()
    page = Page()
    page.feed(html)
    text = "".join(page.text)
    assert page.tags["svg"] == 6  # quality, front, three rows of heat maps, stream
    for name in ("quality", "pareto", "heat-full", "heat-snapkv", "heat-full-kivi4", "stream"):
        assert any(identity.startswith(f"{name}-") for identity in page.ids)
    for words in (
        "Quality against bytes",
        "Pareto front",
        "depth by length",
        "Perplexity along a stream",
        "cannot reach",
    ):
        assert words in text
    assert max(page.ids.values()) == 1
    assert not page.tags["script"] + page.tags["link"] + page.tags["img"]
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import", html)
    assert {link[1:] for link in page.links} <= set(page.ids)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policies", "snapkw"], "policy snapkw: there are adakv, adaptive"),
        (["--policies", "snapkv@0.2"], "leave the budget out"),
        (["--policies", "snapkv:beta=3"], "beta is a knob of pyramidkv"),
        (["--budgets", "1.0,1.5"], "shares of the full cache's bytes in (0, 1], got 1.0, 1.5"),
        (["--budgets", "half"], "--budgets half: write numbers"),
        (["--tasks", "needle,poetry"], "no task is called poetry; there are needle, multi"),
        (["--tasks", ","], "name a task"),
        (["--lengths", "64"], "at least 256, got 64"),
        (["--depths", "2"], "from 0 (the beginning) to 1"),
        (["--samples", "0"], "at least 1"),
        (["--stream-tokens", "100"], "at least 512 tokens"),
        (["--lengths", "8192"], "tiny takes 4096 tokens; --lengths go up to 4032"),
        (["--model", "no/such/folder/at-all"], "cannot load no/such/folder/at-all"),
        (["--device", "abacus"], "cannot load tiny"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_2(arguments, says, tmp_path):
    result = call("--out", tmp_path / "run", *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    result = call("--out", tmp_path / "file" / "run", "--tasks", "code", *SMALL)
    assert result.exit_code == 2
    assert "cannot use" in result.stderr


def test_a_missing_extra_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "an evaluation needs matplotlib; install with: pip install 'warmkv[eval]'" in result.stderr


def test_quick_changes_defaults_only():
    assert make(True, {"samples": 7, "lengths": None}).samples == 7
    assert make(True, {}).lengths == (512, 1024)
    assert make(False, {"lengths": None}).lengths == EvalPlan().lengths
    assert make(True, {}).tasks == tasks.NAMES


def test_what_is_named_twice_is_asked_once():
    given = {"tasks": ("needle", "needle"), "lengths": (256, 512, 256), "depths": (0.5, 0.5), "forms": ("chat", "chat")}
    plan = make(False, given)
    assert [(part.name, len(part)) for part in plan.parts(True)] == [("needle-chat-256", 5), ("needle-chat-512", 5)]
    assert plan == make(False, {name: tuple(dict.fromkeys(values)) for name, values in given.items()})


def test_policies_are_split_at_commas_but_not_within_knobs():
    assert split_policies("full, snapkv:window=16,kernel=7,h2o,") == ("full", "snapkv:window=16,kernel=7", "h2o")


def test_labels_are_the_short_form_without_a_budget():
    plan = EvalPlan(policies=("kivi", "snapkv+ring:window=16", "shotkv", "full", "h2o"))
    assert list(plan.specs()) == ["full", "full+kivi4:residual=128", "snapkv+ring:window=16", "snapkv+shots", "h2o"]
    with pytest.raises(EvalError, match="leave the budget out"):
        EvalPlan(policies=("snapkv@100",))

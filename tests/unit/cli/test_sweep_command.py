"""`warmkv sweep` and `warmkv compare` as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests import grafana
from tests.html import Page
from warmkv.cli import app

GRID = """
ttl: [1m, 1h]
prefix_cache.memory_bytes: [1MiB, 64MiB]
compression.policy: [full, snapkv@0.25]
"""


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A trace, a grid, and results of an evaluation that knows snapkv and not the rest."""
    folder = tmp_path_factory.mktemp("sweep")
    done = call("workload", "--sessions", 10, "--hours", 0.1, "--length-scale", 0.4, "--out", folder / "log.jsonl")
    assert done.exit_code == 0, done.output
    (folder / "grid.yaml").write_text(GRID)
    common = {"task": "code", "variant": "plain", "length": 500, "depth": None, "sample": 0, "prompt_tokens": 500}
    rows = [("full", None, 0.8, None), ("snapkv", 0.2, 0.6, 100), ("snapkv", 0.5, 0.8, 250)]
    names = ("policy", "share", "score", "budget")
    measured = [{**common, **dict(zip(names, row, strict=True))} for row in rows]
    pq.write_table(pa.Table.from_pylist(measured), folder / "results.parquet")
    return folder


@pytest.fixture(scope="module")
def done(files):
    arguments = [files / "log.jsonl", "--grid", files / "grid.yaml", "--out", files / "run", "--workers", 1]
    arguments += ["--quality", files / "results.parquet"]
    return arguments, call("sweep", *arguments)


def test_help_is_instant_and_has_an_example():
    code = (
        "import sys, warmkv.cli; assert not {'torch', 'ray', 'numpy', 'pyarrow', 'matplotlib', 'simpy'} "
        "& set(sys.modules), 'too much'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("sweep", "compare"):
        result = call(name, "--help")
        assert result.exit_code == 0
        assert "Example" in result.output


def test_the_table_has_every_point_and_marks_the_front(done):
    _, result = done
    assert result.exit_code == 0, result.output
    assert result.stdout.count("snapkv@0.25") == 4
    assert "*" in result.stdout
    assert "…" not in result.stdout
    assert "unknown" not in result.stdout


def test_the_files_agree(done, files):
    document = json.loads((files / "run" / "results.json").read_text())
    table = pq.read_table(files / "run" / "results.parquet").to_pylist()
    assert len(table) == len(document["points"]) == 8
    for row, point in zip(table, document["points"], strict=True):
        assert {name: row[name] for name in point["figures"]} == pytest.approx(point["figures"])
        assert {name: row[name] for name in point["values"]} == point["values"]
        assert row["front"] == point["front"]
        stored = json.loads((files / "run" / "points" / f"{point['key']}.json").read_text())
        assert point["figures"] == {**stored["figures"], "quality": point["figures"]["quality"]}
    quality = {row["policy"]: row["quality"] for row in table}
    assert quality["full"] == 1.0
    assert 0.75 < quality["snapkv@0.25"] < 0.9  # measured at 20% and 50% of the tokens; short prompts keep all
    drawn = grafana.rows(grafana.tables()["Points of a sweep"], document)
    assert [row["hit rate"] for row in drawn] == [point["figures"]["hit_rate_tokens"] for point in document["points"]]
    assert all(None not in row.values() for row in drawn), "a column that results.json does not have"
    assert pq.read_schema(files / "run" / "results.parquet").field("ttl").type == pa.float64()


def test_the_same_again_does_nothing_and_json_prints_only_the_document(done, files):
    arguments, _ = done
    before = {file.name: file.stat().st_mtime_ns for file in (files / "run" / "points").iterdir()}
    result = call("sweep", *arguments, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((files / "run" / "results.json").read_text())
    assert {file.name: file.stat().st_mtime_ns for file in (files / "run" / "points").iterdir()} == before


def test_the_report_has_every_chart_and_needs_no_network(done, files):
    html = (files / "run" / "report.html").read_text()
    page = Page()
    page.feed(html)
    text = "".join(page.text)
    assert page.tags["svg"] == 5  # front, quality, three settings
    for words in ("Pareto front", "Cost against quality", "Against ttl", "Against compression.policy", "hit_rate"):
        assert words in text
    assert max(page.ids.values()) == 1
    assert not page.tags["script"] + page.tags["link"] + page.tags["img"]
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import", html)


def test_without_results_quality_is_unknown(files, tmp_path):
    grid = tmp_path / "grid.yaml"
    grid.write_text("[{compression.policy: full}, {}, {compression.policy: snapkv@0.25, gateway.port: 1}]")
    result = call("sweep", files / "log.jsonl", "--grid", grid, "--out", tmp_path / "run", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("unknown") == 3
    points = json.loads((tmp_path / "run" / "results.json").read_text())["points"]
    assert [point["figures"]["quality"] for point in points] == [None] * 3
    assert "--quality" in (tmp_path / "run" / "report.html").read_text()


def test_many_points_are_drawn_and_listed_in_short(files, tmp_path):
    grid = tmp_path / "grid.yaml"
    slots = ", ".join(map(str, range(1, 12)))
    grid.write_text(f"{{engine.max_slots: [{slots}], ttl: [1m, 2m, 3m, 4m], gateway.port: [3]}}")
    result = call("sweep", files / "log.jsonl", "--grid", grid, "--out", tmp_path / "run", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "points that are not on the front: see results.parquet" in result.stdout


@pytest.mark.parametrize(
    ("grid", "options", "says"),
    [
        ("prefix_cache.memory_byte: [1]", [], "did you mean 'memory_bytes'?"),
        ("ttl: [1m]", ["--front", "dollars,ttft_p9"], "did you mean 'ttft_p99'?"),
        ("ttl: [1m]", ["--front", "dollars"], "name at least two figures"),
        ("ttl: [1m]", ["--quality", "/no/results.parquet"], "cannot read /no/results.parquet"),
        ("ttl: [1m, 2m]", ["--max-points", "1"], "2 points, more than 1"),
        ("compression.policy: [full]", ["--as-recorded"], "keeps each request's own policy"),
        ("ttl: [1m]", ["--step-times", "log"], "no record of the log carries timings"),
        ("ttl: [1m]", ["--set", "engine.max_slot=1"], "did you mean 'max_slots'?"),
        ("ttl: [1m]", ["--out", "/dev/null/x"], "cannot use"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(files, tmp_path, grid, options, says):
    (tmp_path / "grid.yaml").write_text(grid)
    out = tmp_path / "run"
    result = call(
        "sweep", files / "log.jsonl", "--grid", tmp_path / "grid.yaml", "--out", out, "--workers", 1, *options
    )
    assert result.exit_code == 2, result.output
    assert says in result.stderr.replace("\n", " ")
    assert not out.exists()


def test_a_trace_without_requests_is_refused(files, tmp_path):
    for content, says in [("", "is empty"), (None, "cannot read"), ("{\n", "is of no format")]:
        if content is not None:
            (tmp_path / "log").write_text(content)
        result = call("sweep", tmp_path / ("log" if content is not None else "none"), "--grid", files / "grid.yaml")
        assert result.exit_code == 2
        assert says in result.stderr.replace("\n", " ")


def test_a_missing_extra_says_what_to_install(monkeypatch, files):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = call("sweep", files / "log.jsonl", "--grid", files / "grid.yaml")
    assert result.exit_code == 2
    assert "a sweep needs pyarrow; install with: pip install 'warmkv[eval]'" in result.stderr


def test_two_points_of_a_sweep_are_compared(done, files):
    run = files / "run"
    shown = call("compare", f"{run}:1", f"{run}:4")
    assert shown.exit_code == 0, shown.output
    assert "compression.policy: full → snapkv@0.25" in shown.stdout
    result = call("compare", f"{run}:1", f"{run}:4", "--json")
    document = json.loads(result.stdout)
    assert document["settings"] == {
        "compression.policy": ["full", "snapkv@0.25"],
        "prefix_cache.memory_bytes": [1 << 20, 64 << 20],
    }
    points = json.loads((run / "results.json").read_text())["points"]
    by_name = {effect["name"]: effect for effect in document["effects"]}
    assert by_name["dollars"]["a"] == points[0]["figures"]["dollars"]
    assert by_name["quality"]["b"] == points[3]["figures"]["quality"]
    assert by_name["quality"]["better"] is False
    same = call("compare", f"{run}:1", run / "points" / f"{points[0]['key']}.json", "--json")
    assert json.loads(same.stdout)["settings"] == {}


def test_a_run_and_a_point_of_the_same_settings_have_the_same_figures(done, files):
    flags = ["--set", "prefix_cache.memory_bytes=1MiB", "--ttl", 60, "--policy", "full"]
    assert call("replay", files / "log.jsonl", *flags, "--out", files / "alone").exit_code == 0
    document = json.loads(call("compare", f"{files / 'run'}:1", files / "alone", "--json").stdout)
    assert document["effects"]
    assert all(effect["change"] == 0 for effect in document["effects"])
    assert (document["only_a"], document["only_b"]) == (["quality"], [])
    assert not [path for path in document["settings"] if path.startswith("prefix_cache")]


def test_lifetimes_of_a_sweep_are_compared(done, files):
    shown = call("compare", f"{files / 'run'}:1", f"{files / 'run'}:5")
    assert "ttl: 1m → 1h" in shown.stdout

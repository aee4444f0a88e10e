import json
import math

import pytest
from typer.testing import CliRunner

from tests.unit.cli.test_replay_command import modules_after
from tests.unit.simulator.published import published
from tests.unit.simulator.test_traces import FILES, MOONCAKE
from warmkv.cli import app


def call(*arguments):
    return CliRunner().invoke(app, ["cachesim", *map(str, arguments)])


def figures(*arguments):
    result = call(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    return path


def test_help_has_an_example_and_loads_nothing_heavy():
    result = call("--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    loaded = modules_after("import warmkv.cli.simulating.cachesim")
    assert not loaded & {"torch", "ray", "numpy", "simpy", "matplotlib"}


def test_every_capacity_and_lifetime_has_a_point(trace):
    document = figures(trace, "--capacity", "1k, 2 blocks", "--capacity", "unlimited", "--ttl", "1,1m")
    points = [(point["unit"], point["amount"], point["ttl"], point["hit_tokens"]) for point in document["points"]]
    assert points == [
        ("tokens", 1000, 1, 0),
        ("tokens", 1000, 60, 0),  # of 1024 tokens the first block was evicted
        ("blocks", 2, 1, 0),
        ("blocks", 2, 60, 1024),
        ("tokens", None, 1, 0),
        ("tokens", None, 60, 1024),
    ]
    assert document["trace"]["input_tokens"] == 2224
    assert document["ideal"]["token_hit_rate"] == pytest.approx(1024 / 2224)


def test_sizes_in_bytes_and_corrections(trace):
    points = figures(trace, "--capacity", "2KB", "--token-bytes", 1, "--partial-hit-tokens", 50)["points"]
    assert points[0]["hit_tokens"] == 1024 + 50
    assert figures(trace, "--capacity", "2k", "--min-hit-tokens", 1099)["points"][0]["hit_tokens"] == 1099


def test_without_capacities_round_ones_are_shown(trace):
    assert [point["amount"] for point in figures(trace)["points"]] == [10e3, None]
    assert [point["amount"] for point in figures(trace, "--ttl", 5)["points"]] == [None]


def test_json_without_a_file_is_printed(trace):
    expected = call(trace, "--capacity", "2k", "--json", "-").stdout
    assert call(trace, "--capacity", "2k", "--json").stdout == expected
    assert call(trace, "--json", "--capacity", "2k").stdout == expected
    assert json.loads(expected)["points"]


def test_orders_of_eviction_stand_side_by_side(trace):
    points = figures(trace, "--capacity", "2k,unlimited", "--eviction", "lfu,lru,cost")["points"]
    assert [point["eviction"] for point in points] == ["lru", "lru", "lfu", "lfu", "cost", "cost"]
    assert {point["hit_tokens"] for point in points} == {1024}


def test_a_table_and_a_file(trace, tmp_path):
    result = call(trace, "--capacity", "2k", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "an unlimited cache finds 46.04% of the tokens" in result.stdout
    assert "0.4604" in result.stdout
    assert json.loads((tmp_path / "out.json").read_text())["points"][0]["capacity"] == "2k"


@pytest.mark.parametrize("options", [[], ["--capacity", "1k,2k", "--ttl", "1,60"], ["--ttl", "1,60"]])
def test_the_curve_is_drawn(trace, tmp_path, options):
    pytest.importorskip("matplotlib")
    result = call(trace, *options, "--plot", tmp_path / "curve.svg")
    assert result.exit_code == 0, result.output
    drawn = (tmp_path / "curve.svg").read_text()
    assert "prompt tokens found" in drawn
    assert ("TTL 60 s" in drawn) == (len(options) == 4)
    assert call(trace, "--plot", tmp_path / "curve.xyz").exit_code == 2


def test_every_order_that_was_asked_for_is_drawn(trace, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from warmkv.simulator.reports import hit_rate_chart

    drawn = []
    monkeypatch.setattr(hit_rate_chart, "save", lambda *arguments: drawn.append(arguments[:2]))
    options = ["--capacity", "1k,2k,unlimited", "--plot", tmp_path / "curve.svg"]
    found = figures(trace, *options, "--eviction", "lfu")["points"]
    figures(trace, *options, "--eviction", "lru,lfu", "--ttl", "60,unlimited")
    figures(trace, "--eviction", "lfu", "--ttl", "1,60", "--plot", tmp_path / "curve.svg")
    (alone, same), (lines, marks), (against_ttl, _) = drawn
    walked = [(point["amount"], point["token_hit_rate"]) for point in found if point["amount"]]
    assert alone == same == {"lfu, no TTL": walked}
    assert list(lines) == list(marks) == [f"{name}, {ttl}" for name in ("lru", "lfu") for ttl in ("TTL 60 s", "no TTL")]
    assert lines["lfu, no TTL"] == marks["lfu, no TTL"] == walked
    assert len(lines["lru, no TTL"]) > 2 == len(marks["lru, no TTL"])
    assert [seconds for seconds, _ in against_ttl["lfu, unlimited capacity"]] == [1, 60]


def test_sessions_have_caches_of_their_own(tmp_path):
    path = tmp_path / "sessions"
    path.write_text(FILES["agentic"])
    shared, apart = (figures(path, "--capacity", "14", "--scope", scope)["points"] for scope in ("global", "session"))
    assert apart[0]["hit_blocks"] == 2 > shared[0]["hit_blocks"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "cannot read"),
        ("", [], "is empty"),
        ("{\n", ["--format", "mooncake"], "has no request"),
        ("{\n", ["--format", "mooncake", "--strict"], ":1: not JSON"),
        (MOONCAKE, ["--format", "csv"], "'csv' is no trace format"),
        (MOONCAKE, ["--capacity", "2GiB"], "needs the bytes of a token"),
        (MOONCAKE, ["--capacity", "1k,2 blocks", "--plot", "-"], "in tokens and in blocks have no axis in common"),
        (MOONCAKE, ["--capacity", "big"], "'big' is no capacity"),
        (MOONCAKE, ["--ttl", "long"], "'long' is no time"),
        (MOONCAKE, ["--eviction", "fifo"], "--eviction fifo: there are lru, lfu"),
        (MOONCAKE, ["--scope", "session"], "does not tell the session"),
        (MOONCAKE, ["--model", "/nowhere"], "cannot read /nowhere"),
        (MOONCAKE, ["--model", "/nowhere", "--token-bytes", "2"], "exclude each other"),
        (MOONCAKE, ["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
        (FILES["azure"], [], "azure has no block hashes"),
    ],
)
def test_faults_end_with_code_2_and_a_line(tmp_path, text, options, message):
    path = tmp_path / "trace"
    if text is not None:
        path.write_text(text)
    result = call(path, *options)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", "")
    assert "Traceback" not in result.output


def test_mooncake_figure_9_by_the_command():
    options = ["--capacity", "10k,10M,100M", "--partial-hit-tokens", 256, "--min-hit-tokens", 880]
    document = figures(published("mooncake_conversation.jsonl"), *options)
    rates = [point["token_hit_rate"] for point in document["points"]]
    assert rates == pytest.approx([0.0449, 0.3263, 0.4006], abs=0.006)
    assert math.isclose(document["ideal"]["token_hit_rate"], rates[-1], abs_tol=1e-3)

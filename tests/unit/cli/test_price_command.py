"""`warmkv price` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warmkv.cli import app


def run(*args: str):
    return CliRunner().invoke(app, ["price", *args])


def test_it_explains_itself():
    result = run("--help")
    assert result.exit_code == 0
    assert "Examples" in result.output


def test_the_articles_example():
    """50,000 + 200 tokens, ten calls at 5 dollars a million: 0.314 first, 0.026 later, 0.548 for 2.51, 78% less."""
    document = json.loads(run("--set", "pricing.input=5", "--json", "-").output)
    short, long = document["ttls"]
    assert document["uncached_uses"] == pytest.approx(2.51)
    assert (short["first"], short["later"], short["uses"]) == pytest.approx((0.3135, 0.026, 0.5475))
    assert short["saved"] == pytest.approx(0.78, abs=0.005)
    assert (short["break_even_uses"], long["break_even_uses"]) == pytest.approx((1.28, 2.11), abs=0.005)
    assert "hits" not in short


def test_the_documentation_shows_what_is_printed():
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    command, *table = text.partition("$ warmkv price ")[2].partition("```")[0].strip().splitlines()
    printed = [line.rstrip() for line in run(*command.split()).output.splitlines()]
    assert all(line in printed for line in table)
    assert len(table) == 4


def test_requests_at_random_write_again_when_they_come_late():
    slow, fast = (
        json.loads(run("--tokens", "8000", "--per-hour", rate, "--json", "-").output)["ttls"][0] for rate in ("2", "4")
    )
    assert slow["steady_saved"] < 0 < fast["steady_saved"]
    assert slow["break_even_per_hour"] == pytest.approx(2.94, abs=0.005)
    steady = slow["hits"] * slow["later"] + (1 - slow["hits"]) * slow["first"]
    assert slow["steady"] == pytest.approx(steady)


def test_the_table_and_the_file_show_the_same(tmp_path: Path):
    file = tmp_path / "price.json"
    shown = run("--uses", "3", "--per-hour", "1", "--json", str(file))
    assert shown.exit_code == 0
    for row in json.loads(file.read_text())["ttls"]:
        line = next(line for line in shown.output.splitlines() if line.startswith(row["ttl"]))
        assert f"${row['uses']:.4f}" in line
        assert f"{row['saved']:.1%}" in line
        assert f"{row['steady_saved']:.1%}" in line


def test_reads_that_save_nothing_never_pay():
    shown = run("--set", "pricing.read=1", "--json", "-")
    assert json.loads(shown.output)["ttls"][0]["break_even_uses"] is None
    assert "never" in run("--set", "pricing.read=1").output


def test_a_model_s_own_prices_are_used():
    flags = ["--set", "pricing.models={big: {input: 30}}", "--json", "-"]
    served, big = (json.loads(run(*more, *flags).output) for more in ([], ["--model", "big"]))
    assert big["uncached"] == pytest.approx(10 * served["uncached"])


def test_a_prefix_below_the_minimum_is_said_not_to_be_cached():
    assert "would not be cached" in run("--tokens", "63").output
    assert "would not be cached" not in run("--tokens", "64").output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--set", "pricing.raed=1"], "did you mean 'read'"),
        (["--json", "no/such/folder/price.json"], "cannot write"),
    ],
)
def test_what_cannot_be_computed_ends_with_2_and_the_reason(args, says):
    result = run(*args)
    assert result.exit_code == 2
    assert says in result.stderr

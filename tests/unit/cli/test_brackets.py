"""What comes from outside is printed as it is: brackets in a name or an error are never read as markup."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import warmkv
from tests.unit.simulator.conversations import record
from warmkv.cli import app
from warmkv.config import Config
from warmkv.terminal import Terminal, plain_table, ruled_table, show_table

NAME = "[bold]x[/y]"
ROOT = Path(warmkv.__file__).parent


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", NAME],
        ["demo", "-c", NAME],
        ["doctor", "--set", f"model.path={NAME}"],
        ["config", "show", "-c", NAME],
        ["replay", NAME],
        ["replay", "x", "--scope", NAME],
        ["replay", "x", "--policy", NAME],
        ["replay", "x", "--gpu", NAME],
        ["sweep", "x", "--grid", NAME],
        ["tune", "x", "--grid", NAME, "--minimize", "dollars"],
        ["compare", NAME, NAME],
        ["verify", NAME],
        ["cachesim", NAME],
        ["calibrate", NAME, "--max-num-seqs", 1, "--max-batched-tokens", 1],
        ["workload", "--sessions", 1, "--out", f"/nowhere/{NAME}"],
        ["workload", "--preset", NAME, "--out", "x"],
        ["price", "--json", f"/nowhere/{NAME}"],
        ["eval", "--policies", NAME],
        ["eval", "--model", NAME, "--out", "/dev/null/x"],
        ["bench", "--model", NAME],
        ["profile", "--model", NAME],
        ["policy", "show", "--url", f"http://{NAME}"],
        ["policy", "set", NAME, "--why", "x"],
        ["dashboards", "build", f"/dev/null/{NAME}"],
        ["dashboards", "metrics", f"/nowhere/{NAME}"],
        ["dashboards", "publish", "-c", NAME],
        ["k8s", "render", "-c", NAME],
        ["k8s", "fetch", "-c", NAME],
        ["k8s", "drain", "-c", NAME],
        ["packs", "build", "x", "--tenant", "a", "-c", NAME],
        ["packs", "load", NAME],
        ["packs", "show", NAME],
        ["docs", f"/nowhere/{NAME}"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_every_command_tells_an_error_as_it_is_written(arguments):
    result = call(*arguments)
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert NAME in result.output


def test_names_with_brackets_are_shown_where_everything_goes_well(tmp_path):
    folder = tmp_path / "[bold]"
    folder.mkdir()
    log, out = folder / "[red]log.jsonl", folder / "run"
    log.write_text("".join(record(float(n), [1] * 80).to_json() + "\n" for n in range(2)))
    grid = folder / "grid.yaml"
    grid.write_text("ttl: [1m, 1h]\n")
    assert "written to" in call("replay", log, "--out", out).stdout
    assert f"from {out} to {out}" in call("compare", out, out).stdout
    swept = call("sweep", log, "--grid", grid, "--out", folder / "sweep", "--workers", 1)
    assert f"{folder / 'sweep'}/report.html" in swept.stdout
    assert str(folder / "[i]w") in call("workload", "--sessions", 1, "--out", folder / "[i]w").stderr
    served = [replace(record(float(n), [1] * 80), replica="only") for n in range(2)]
    log.write_text("".join(one.to_json() + "\n" for one in served))
    verified = call("verify", log, "--json", folder / "[b]verified.json")
    assert json.loads((folder / "[b]verified.json").read_text())["requests"] == 2, verified.output


def test_a_model_with_brackets_is_served_under_its_name():
    from warmkv.platform.serving import _explain

    out = io.StringIO()
    _explain(f"http://{NAME}", Config.model_validate({"model": {"served_name": NAME}}), Terminal(file=out))
    assert out.getvalue().count(NAME) >= 4


def test_with_tenants_the_examples_have_a_key():
    from warmkv.platform.serving import _explain

    for tenants, key in (([], 'api_key="any"'), ([{"name": "a", "key_sha256": "0" * 64}], "$WARMKV_TENANT_KEY")):
        out = io.StringIO()
        _explain("http://x", Config.model_validate({"gateway": {"tenants": tenants}}), Terminal(file=out))
        assert key in out.getvalue()
        assert ("export WARMKV_TENANT_KEY" in out.getvalue()) == bool(tenants)
        assert "WARMKV_API_KEY" not in out.getvalue()  # an operator's, by which `warmkv policy` would go


def test_tables_show_brackets_and_lose_nothing():
    out = io.StringIO()
    for table in (plain_table(NAME, "n"), ruled_table(NAME, NAME, "n", caption=NAME)):
        table.add_row(f"{NAME} " * 30, ":smile:")
        show_table(table, Terminal(file=out))
    assert out.getvalue().count(NAME) == 2 * 30 + 4
    assert out.getvalue().count(":smile:") == 2


def test_nothing_else_makes_a_console_or_markup():
    """A console of its own would read brackets as markup: `Terminal` is the one that does not."""
    makes = re.compile(r"\bConsole\(|from_markup|markup=True|rich import print|\[/?(red|green|bold)\]")
    files = [path for path in ROOT.rglob("*.py") if path.name != "terminal.py"]
    assert len(files) > 200
    found = [path.relative_to(ROOT).as_posix() for path in files if makes.search(path.read_text(encoding="utf-8"))]
    assert not found

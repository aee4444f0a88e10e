"""Faults of the user are told in a line and end with 2 or 1; faults of warmkv end with 70 and their traceback."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from warmkv import cli
from warmkv.config import ConfigError
from warmkv.faults import INTERNAL, UserError
from warmkv.platform.local import StartError
from warmkv.simulator.engine.limits import BatchingError
from warmkv.simulator.studies.replays.log_fit import LogFitError
from warmkv.simulator.studies.sweeps import compare, sweep

BRACKETS = "[/usr/lib] no [bold]such[/bold] thing"


def broken(*args, **kwargs):
    raise ValueError(f"a slip in warmkv {BRACKETS}")


@pytest.fixture
def run(monkeypatch, capsys):
    """The script as a shell calls it: exit code and what it wrote to stderr."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["warmkv", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    file = tmp_path_factory.mktemp("log") / "sessions.jsonl"
    assert CliRunner().invoke(cli.app, ["workload", "--sessions", "2", "--out", str(file)]).exit_code == 0
    lines = [json.loads(line) | {"replica": "only"} for line in file.read_text().splitlines()]  # as of a live run
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def grid(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text("engine.max_slots: [4]\n")
    return file


def commands(log, grid, folder):
    point = ("--grid", grid, "--out", folder / "out", "--workers", 1)
    return {
        "replay": ("warmkv.simulator.studies.replays.step_times.choose_cost", ["replay", log]),
        "verify": ("warmkv.simulator.studies.replays.verify.verify", ["verify", log]),
        "sweep": ("warmkv.simulator.studies.sweeps.sweep.replay", ["sweep", log, *point]),
        "tune": (
            "warmkv.simulator.studies.sweeps.sweep.replay",
            ["tune", log, "--minimize", "ttft_p99", "--subject-to", "ttft_p99<9", *point],
        ),
        "calibrate": (
            "warmkv.simulator.latency.measured_requests.read",
            ["calibrate", log, "--max-num-seqs", 1, "--max-batched-tokens", 1],
        ),
        "compare": ("warmkv.simulator.studies.sweeps.compare.compare", ["compare", folder, folder]),
        "price": ("warmkv.policies.pricing.uncached", ["price", "--tokens", 100]),
    }


@pytest.mark.parametrize("name", ["replay", "verify", "sweep", "tune", "calibrate", "compare", "price"])
def test_a_slip_in_warmkv_is_not_shown_as_the_users_mistake(name, run, log, grid, tmp_path, monkeypatch):
    where, command = commands(log, grid, tmp_path)[name]
    if name == "compare":
        monkeypatch.setattr(compare, "read", lambda run: None)
    monkeypatch.setattr(where, broken)
    code, said = run(*command)
    assert code == INTERNAL
    assert f"ValueError: a slip in warmkv {BRACKETS}" in said
    assert "in broken" in said  # the traceback
    assert "Please report it" in said


@pytest.mark.parametrize(
    ("error", "code"), [(StartError(BRACKETS), 1), (OSError(BRACKETS), 1), (RuntimeError(BRACKETS), INTERNAL)]
)
@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_service_that_cannot_start_says_why_as_it_is_written(command, error, code, run, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr("warmkv.platform.serving.serve_until_stopped", fail)
    monkeypatch.setattr("warmkv.demo.run", fail)
    ended, said = run(command)
    assert ended == code
    assert BRACKETS in said
    assert ("Traceback" in said) == (code == INTERNAL)


def test_a_setting_with_brackets_is_told_as_it_is_written(run):
    code, said = run("config", "show", "--set", "engine.max_slots='[/x]'", "--set", "engine.kv_bytes='[/bold]'")
    assert code == 2
    assert "engine.kv_bytes: write auto, or bytes as in 40GiB, 512MiB or 1000000; got '[/bold]'" in said


def test_a_fault_of_the_whole_configuration_is_told_without_another_head(run):
    code, said = run("config", "show", "--set", "cluster.groups.a.engine.max_slots=-1")
    assert (code, said.startswith("configuration: cluster.groups.a.engine.max_slots: ")) == (2, True), said


def test_a_users_mistake_that_no_command_expects_is_told_without_a_traceback(run, monkeypatch):
    def fail(*args):
        raise ConfigError("write it so")

    monkeypatch.setattr("warmkv.platform.tenants.hash_key", fail)
    assert run("hash-key", "--key", "x") == (2, "configuration: write it so\n")


def test_what_users_can_put_right_has_one_class():
    for error in (ConfigError, StartError, BatchingError, LogFitError, sweep.SweepError, compare.CompareError):
        assert issubclass(error, UserError)

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.unit.simulator.conversations import record
from warmkv.simulator import commands
from warmkv.simulator.command_line import JsonCommand
from warmkv.simulator.workload_command import workload

app = typer.Typer(rich_markup_mode="markdown")
app.command(cls=JsonCommand)(commands.replay)
app.command()(workload)


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    result = call("workload", "--sessions", 12, "--hours", 0.1, "--length-scale", 0.5, "--seed", 3, "--out", path)
    assert result.exit_code == 0, result.output
    assert "requests in 12 sessions" in result.stderr
    return path


def test_help_has_an_example():
    for name in ("replay", "workload"):
        result = call(name, "--help")
        assert result.exit_code == 0
        assert "Example" in result.output


def test_a_generated_log_is_replayed_side_by_side(log):
    result = call("replay", log, "--set", "cluster.replicas=2")
    assert result.exit_code == 0, result.output
    assert "step times: configuration" in result.stdout
    for label in ("full", "snapkv@0.2", "snapkv@0.5", "streaming_llm@0.2", "streaming_llm@0.5"):
        assert result.stdout.count(f"\n {label} ") == 4  # two TTLs, two tables
    assert "…" not in result.stdout


def test_the_grid_follows_the_options(log):
    result = call("replay", log, "--ttl", 60, "--policy", "snapkv", "--budget", 128, "--as-recorded", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [(v["policy"], v["ttl"]) for v in document["variants"]] == [
        ("as recorded", None),
        ("full", 60),
        ("snapkv@128", 60),
    ]
    assert document["step_times"]["source"].startswith("configuration")
    assert document["variants"][0]["ttft"]["p50"] > 0


def test_json_goes_to_a_file_beside_the_table(log, tmp_path):
    out = tmp_path / "out.json"
    result = call("replay", log, "--ttl", 60, "--policy", "full", "--json", out)
    assert result.exit_code == 0, result.output
    assert "Cache and cost" in result.stdout
    assert len(json.loads(out.read_text())["variants"]) == 1


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "cannot read"),
        ("", [], "has no request to replay"),
        ("{\n[]\n", [], "has no request to replay"),
        ("{\n", ["--strict"], ":1: not JSON"),
        ("GOOD", ["--ttl", "-1"], "a TTL must be a positive number of seconds"),
        ("GOOD", ["--budget", "much"], "--budget much: write tokens"),
        ("GOOD", ["--budget", "1.5"], "a share must be in"),
        ("GOOD", ["--policy", "magic"], "policy magic at budget 0.2: name"),
        ("GOOD", ["--set", "engine.max_slot=1"], "did you mean 'max_slots'?"),
        ("GOOD", ["--step-times", "log"], "no record of the log carries timings"),
        ("GOOD", ["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    ],
)
def test_faults_end_with_code_2_and_a_line(tmp_path, content, options, message):
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_text(content.replace("GOOD", record(0, [1] * 9).to_json()))
    result = call("replay", path, *options)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", "")
    assert "Traceback" not in result.output


def test_broken_lines_are_told_and_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(record(0, [1] * 9).to_json() + "\n{\n")
    result = call("replay", path, "--ttl", 60, "--policy", "full")
    assert result.exit_code == 0
    assert "1 broken lines left out" in result.stderr


def test_a_workload_that_cannot_be_is_refused(tmp_path):
    result = call("workload", "--length-scale", 0, "--out", tmp_path / "x")
    assert result.exit_code == 2
    assert "length_scale must be positive" in result.stderr
    result = call("workload", "--sessions", 1, "--out", tmp_path / "no" / "x")
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_presets_are_mixed(tmp_path):
    result = call("workload", "--preset", "rag=3", "--preset", "chat", "--sessions", 2, "--out", tmp_path / "x")
    assert result.exit_code == 0, result.output
    assert "in 5 sessions" in result.stderr
    for wrong, message in [("poetry", "there are chat"), ("rag=many", "NAME=SESSIONS"), ("rag", "each preset once")]:
        result = call("workload", "--preset", "rag", "--preset", wrong, "--out", tmp_path / "x")
        assert result.exit_code == 2
        assert message in result.stderr.replace("\n", "")


def test_a_workload_for_other_tools(tmp_path):
    path = tmp_path / "trace"
    assert call("workload", "--sessions", 3, "--format", "mooncake", "--out", path).exit_code == 0
    assert json.loads(path.read_text().splitlines()[0]).keys() >= {"timestamp", "hash_ids"}


def test_the_same_seed_writes_the_same_file(tmp_path):
    for name in ("a", "b"):
        assert call("workload", "--sessions", 5, "--out", tmp_path / name).exit_code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def modules_after(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_help_loads_nothing_heavy():
    loaded = modules_after("import warmkv.simulator.commands")
    assert not loaded & {"torch", "ray", "transformers", "fastapi", "numpy", "simpy"}


def test_a_replay_loads_neither_torch_nor_ray(log):
    loaded = modules_after(
        f"sys.argv = ['x', {str(log)!r}]; from warmkv.simulator import commands; import typer; "
        "app = typer.Typer(); app.command()(commands.replay); app(standalone_mode=False)"
    )
    assert "simpy" in loaded
    assert not loaded & {"torch", "ray", "transformers", "fastapi"}

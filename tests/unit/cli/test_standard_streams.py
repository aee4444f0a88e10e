"""`-` is standard output where a command writes a file, and standard input where it reads a trace."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.unit.simulator.test_traces import FILES
from warmkv.cli import app

ROOT = Path(__file__).parents[3]
SETTINGS = ROOT / "k8s" / "overlays" / "demo" / "warmkv.yaml"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Let no command leave a file named `-`."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("-").exists()


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    assert call("workload", "--sessions", 5, "--hours", 0.1, "--out", path).exit_code == 0
    return path


def call(*arguments, given=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)


def printed(*arguments, given=None):
    result = call(*arguments, given=given)
    assert result.exit_code == 0, result.output
    return result.stdout


# --- output


def test_a_workload_is_printed(log):
    assert printed("workload", "--sessions", 5, "--hours", 0.1, "--out", "-") == log.read_text()
    assert call("workload", "--sessions", 1, "--out", "-").stderr.startswith("-: ")
    for line in printed("workload", "--sessions", 1, "--format", "mooncake", "--out", "-").splitlines():
        assert json.loads(line)["input_length"]


def test_pages_are_printed():
    for command, page in ((("dashboards", "metrics"), "metrics.md"), (("docs",), "commands.md")):
        assert printed(*command, "-") == (ROOT / "docs" / page).read_text(encoding="utf-8")
    policies = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert printed("policy", "methods", "--docs", "-", given=policies) == policies


def test_a_manifest_is_printed():
    text = printed("k8s", "render", "--config", SETTINGS, "-m", "-")
    assert yaml.safe_load(text)["kind"] == "RayService"


def test_a_chart_is_printed(log):
    pytest.importorskip("matplotlib")
    assert printed("cachesim", log, "--plot", "-").lstrip().startswith("<?xml")


def test_a_profile_is_printed(tmp_path):
    row = {"arrival": 0.0, "input_tokens": 100, "output_tokens": 5, "ttft": 0.1, "e2e": 0.3}
    rows = "".join(json.dumps(row | {"arrival": float(at)}) + "\n" for at in range(30))
    limits = ("--max-num-seqs", 8, "--max-batched-tokens", 512)
    document = json.loads(printed("calibrate", "-", *limits, "--profile", "-", given=rows))
    assert document["policies"]


@pytest.mark.parametrize(
    "command",
    [
        ("cachesim", "log.jsonl", "--plot", "-"),
        ("k8s", "render", "--config", SETTINGS, "-m", "-"),
        ("calibrate", "log.jsonl", "--max-num-seqs", 8, "--max-batched-tokens", 512, "--profile", "-"),
    ],
)
def test_a_file_and_the_json_are_not_printed_together(log, command):
    result = call(*command, "--json")
    assert result.exit_code == 2
    assert "both print to standard output" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("--out", ("replay", "log.jsonl", "--out", "-")),
        ("--out", ("sweep", "log.jsonl", "--grid", "grid.yaml", "--out", "-")),
        ("--out", ("tune", "log.jsonl", "--minimize", "dollars", "--grid", "grid.yaml", "--out", "-")),
        ("--out", ("plan", "--trace", "log.jsonl", "--model", "m", "--slo", "ttft_p99<1", "--out", "-")),
        ("--out", ("bench", "--out", "-")),
        ("--out", ("eval", "--out", "-")),
        ("--log", ("route", "--engine", "http://e:1", "--log", "-")),
        ("LOG", ("record", "-", "--upstream", "http://e:1")),
        ("OUT", ("packs", "build", "-", "--tenant", "t")),
        ("FOLDER", ("dashboards", "build", "-")),
    ],
)
def test_what_is_more_than_a_file_is_refused(name, command):
    result = call(*command)
    assert result.exit_code == 2
    assert f"{name}: `-` is standard output" in result.stderr


def test_nobody_is_told_that_a_reader_has_left(log):
    """As in `warmkv workload --out - | head -1`."""
    code = "import sys; from warmkv.cli import main; sys.argv[0] = 'warmkv'; main()"
    arguments = [sys.executable, "-c", code, "workload", "--sessions", "300", "--out", "-"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert "cannot write" not in said
    assert "Traceback" not in said


# --- input


@pytest.mark.parametrize("command", ["replay", "verify", "cachesim"])
def test_a_trace_is_read_from_standard_input(log, command):
    if command == "verify":  # a log of a live run
        lines = [json.loads(line) | {"replica": "only"} for line in log.read_text().splitlines()]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--ttl", "1h", "--policy", "full"] if command == "replay" else []
    from_file, piped = (call(command, *given, *options, "--json", given=log.read_bytes()) for given in ([log], ["-"]))
    assert piped.exit_code == from_file.exit_code
    assert json.loads(piped.stdout) == json.loads(from_file.stdout)


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_trace_comes_through_a_pipe(log, name):
    arguments = [sys.executable, "-m", "warmkv", "cachesim", name, "--json"]
    reader, writer = os.pipe()
    with subprocess.Popen(arguments, stdin=reader, stdout=subprocess.PIPE, text=True) as process:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(log.read_bytes())
        assert json.loads(process.stdout.read()) == json.loads(printed("cachesim", log, "--json"))


def test_a_sweep_of_what_came_through_a_pipe_runs_in_one_process(log):
    pytest.importorskip("pyarrow")
    Path("grid.yaml").write_text("ttl: [1m, 1h]")

    def figures(trace, out):
        options = ("--grid", "grid.yaml", "--out", out, "--workers", 2, "--json")
        result = printed("sweep", trace, *options, given=log.read_bytes())
        return [point["figures"] for point in json.loads(result)["points"]]

    assert figures("-", "piped") == figures(log, "file")


def test_inputs_of_aiperf_beside_nothing_are_not_read(log):
    Path("inputs.json").write_text("[]")
    assert printed("cachesim", "-", given=FILES["aiperf"]).startswith("aiperf: 2 requests")


# --- what a trace is not


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("", [], "trace is empty"),
        ("\n\n", [], "trace is empty"),
        ("hello\n", [], "trace is of no format that is recognised; name its format: warmkv, mooncake"),
        ("a;b\n1;2\n", [], "trace is of no format that is recognised; name its format: warmkv, mooncake"),
        (FILES["litellm"], ["--format", "azure"], "has no request of the format azure; it is of the format litellm"),
        ("hello\n", ["--format", "litellm"], "it was read as litellm"),
    ],
)
@pytest.mark.parametrize("command", ["replay", "verify", "cachesim", "plan"])
def test_every_command_says_what_is_wrong_with_a_trace(tmp_path, command, content, options, says):
    Path("trace").write_text(content)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
            | {"intermediate_size": 128, "vocab_size": 100, "torch_dtype": "bfloat16", "model_type": "llama"}
        )
    )
    plan = ("plan", "--model", "config.json", "--slo", "ttft_p99<1", "--trace", "trace")
    result = call(*(plan if command == "plan" else (command, "trace")), *options)
    assert result.exit_code == 2
    assert says in result.stderr.replace("\n", "")
    assert "gateway.access_log" not in result.stderr


def test_files_that_are_left_out_are_named():
    Path("logs").mkdir()
    Path("logs/a.jsonl").write_text(FILES["litellm"])
    Path("logs/notes.txt").write_text("what\n")
    for command in ("replay", "verify", "cachesim"):
        assert "1 files of no recognised format left out: logs/notes.txt" in call(command, "logs").stderr
        strict = call(command, "logs", "--strict")
        assert strict.exit_code == 2
        assert "logs/notes.txt is of no format that is recognised" in strict.stderr

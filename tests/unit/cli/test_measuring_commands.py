"""The two commands as a user types them, on a small random model."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.unit.simulator.conversations import record
from warmkv.cli import app
from warmkv.measuring.plan import BenchPlan
from warmkv.replicas.loading import packed_weights

CELLS = ("--policies", "full,snapkv@32", "--lengths", "64,96", "--batches", "1,2")
SMALL = (*CELLS, "--new-tokens", "8", "--repeats", "1")
GRID = ("--policies", "full,snapkv", "--lengths", "64,96,144,200", "--batches", "1,2", "--repeats", "1")


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def profile(folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("profile") / "deep" / "profile.json"
    result = call("profile", "--model", folder, *GRID, "--set", "engine.step_tokens=48", "--out", file)
    assert result.exit_code == 0, result.output
    return result, file


def test_help_has_examples_and_needs_no_torch():
    for command in ("bench", "profile"):
        code = (
            f"import sys; sys.argv = ['warmkv', '{command}', '--help']\n"
            "from warmkv.cli import main\n"
            "try: main()\n"
            "except SystemExit as end: assert not end.code\n"
            "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "Examples" in done.stdout
        assert done.stdout.endswith("[]\n")


def test_a_bench_prints_json_alone(folder, monkeypatch):
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 1)
    result = call("bench", "--model", folder, *SMALL, "--json", "-", "--no-prefill")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document) == {"machine", "versions", "commit", "model", "settings", "prefill", "decode"}
    assert document["machine"].keys() >= {"cpu", "cores", "memory_bytes", "threads", "gpu", "load", "system"}
    assert document["versions"].keys() >= {"python", "torch", "transformers", "warmkv"}
    assert document["model"]["name"] == "random"
    weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert weights <= document["model"]["weights_bytes"] < 1.01 * weights  # and its buffers
    assert document["settings"]["policies"] == ["full", "snapkv@32"]
    assert document["settings"]["engine"]["step_tokens"] == "auto"
    assert document["prefill"] == []
    assert len(document["decode"]) == 8
    assert document["decode"][0]["tpot"].keys() == {"median", "least", "most", "repeats"}


def test_a_bench_shows_a_table_and_writes_json_and_plots(folder, tmp_path):
    out, file = tmp_path / "plots", tmp_path / "deep" / "bench.json"
    result = call("bench", "--model", folder, *SMALL, "--json", file, "--out", out)
    assert result.exit_code == 0, result.output
    for text in ("Prompts", "Decoding", "TTFT warm", "of full", "snapkv@32", "100.0%"):
        assert text in result.stdout
    assert "…" not in result.stdout
    assert len(json.loads(file.read_text())["prefill"]) == 4
    for name in ("tpot", "prefill", "bytes"):
        drawing = (out / f"{name}.svg").read_text()
        assert "</svg>" in drawing
        assert "snapkv@32" in drawing


def test_quick_is_less_than_the_default():
    from warmkv.measuring import bench
    from warmkv.measuring.plan import QUICK_BENCH, make

    assert bench.measurements(make(BenchPlan, QUICK_BENCH, {})) < bench.measurements(BenchPlan()) / 3


def test_a_profile_shows_its_errors_and_says_who_reads_it(profile):
    result, file = profile
    for text in ("Step times", "hand-off", "error out", "snapkv", f"replay LOG --profile {file}"):
        assert text in result.stdout
    assert "…" not in result.stdout


def test_a_profile_prints_itself_alone(folder):
    result = call("profile", "--model", folder, *GRID, "--out", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [policy["policy"] for policy in document["policies"]] == ["full", "snapkv"]
    assert document["policies"][0]["decode"].keys() == {"a", "b", "c", "d", "points", "in_sample", "out_of_sample"}
    assert document["formula"].startswith("seconds = a + b * tokens")


def test_a_replay_takes_its_step_times_from_a_profile(profile, tmp_path):
    _, file = profile
    log = tmp_path / "log.jsonl"
    log.write_text("".join(record(float(n), [n] * 40, output=8).to_json() + "\n" for n in range(3)))
    options = ("--policy", "snapkv", "--policy", "tova", "--budget", "0.5", "--ttl", "60")
    shown = call("replay", log, *options, "--profile", file)
    assert shown.exit_code == 0, shown.output
    assert f"step times: measured, {file} (random on " in shown.stdout
    assert "its model's KV shape is not that of simulator.model" in shown.stdout
    assert "not measured: tova gets the times of snapkv" in shown.stderr
    as_setting = call("replay", log, *options, "--json", "-", "--set", f"simulator.profile={file}")
    step_times = json.loads(as_setting.stdout)["step_times"]
    assert step_times["source"].startswith(f"measured, {file}")
    fitted = json.loads(file.read_text())["policies"][1]
    assert step_times["snapkv"]["decode"]["c"] == fitted["decode"]["c"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--policies", "magic"], "bench: policy magic: there are adakv, adaptive"),
        (["bench", "--lengths", "many"], "bench: --lengths many: write whole numbers"),
        (["bench", "--lengths", "5000"], "takes 4096 tokens: with 32 new ones, lengths go up to 4064, got 5000"),
        (["bench", "--lengths", "600", "--set", "engine.max_context=512"], "takes 512 tokens"),
        (["bench", "--set", "engine.kv_bytes=1MiB"], "give --set engine.kv_bytes=1GiB"),
        (["bench", "--set", "engine.kv_byte=1"], "did you mean 'kv_bytes'?"),
        (["bench", "--model", "/nowhere/at/all"], "bench: cannot load /nowhere/at/all"),
        (["bench", "--repeats", "0"], "--repeats must be at least 1"),
        (["bench", "--json", "/proc/none/bench.json"], "bench: cannot write /proc/none"),
        (["profile", "--policies", "snapkv@0.2"], "leave the budget out"),
        (["profile", "--batches", "0"], "batches are numbers of sequences"),
        (["profile", "--lengths", "64,4090"], "lengths go up to 4080, got 4090"),
        (["profile", "--out", "/proc/none/profile.json"], "profile: cannot write /proc/none"),
        (["replay", "log", "--profile", "p", "--step-times", "log"], "exclude each other"),
    ],
)
def test_wrong_input_ends_with_2_and_a_line(arguments, says):
    result = call(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.unit.simulator.conversations import record
from warmkv.cli import app
from warmkv.gpus import CATALOGUE


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
    result = call("replay", log, "--set", "cluster.replicas=2", "--details")
    assert result.exit_code == 0, result.output
    assert "step times: configuration" in result.stdout
    for label in ("full", "snapkv@0.2", "snapkv@0.5", "streaming_llm@0.2", "streaming_llm@0.5"):
        assert result.stdout.count(f"\n{label} ") == 2 + (label == "streaming_llm@0.2")  # two TTLs, and what follows
        assert result.stdout.count(f"\n {label} ") == 6  # three tables more
    assert "…" not in result.stdout


def test_the_first_table_fits_on_a_screen(log):
    result = call("replay", log, "--set", "cluster.replicas=2")
    lines = result.stdout.splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80
    assert "Cache and cost" not in result.stdout


def test_it_ends_with_what_the_lifetimes_did(tmp_path):
    """A conversation that pauses for ten minutes: an hour keeps its prefix, five minutes lose it."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(record(600.0 * n, [1] * 200).to_json() + "\n" for n in range(4)))
    last = call("replay", path, "--ttl", 300, "--ttl", 3600, "--policy", "full").stdout.splitlines()[-1]
    rates = [v["token_hit_rate"] for v in replayed(path, "--ttl", 300, "--ttl", 3600, "--policy", "full")]
    points = 100 * (rates[1] - rates[0])
    assert points > 20
    assert last.startswith(f"TTL 1h instead of 5m: +{points:.1f} points hit rate for the same memory")


def test_refusals_are_told_with_their_causes(tmp_path):
    """Send six short prompts at once to a slot, a queue and a line of one each, and two that no slot holds."""
    path = tmp_path / "log.jsonl"
    short = [record(0.0, [n] * 100, 200, name=f"short {n}") for n in range(6)]
    long = [record(1.0, [n] * 60_000, 200, name=f"long {n}") for n in range(2)]
    path.write_text("".join(one.to_json() + "\n" for one in (*short, *long)))
    options = ("--ttl", 300, "--policy", "full", "--set", "engine={max_slots: 1, max_queue: 1, kv_bytes: 64MiB}")
    options += ("--set", "cluster.max_queued_requests=1")
    shown = call("replay", path, *options).stdout
    assert "8 requests over" in shown
    assert f"{6 * 100 + 2 * 60_000:,} prompt and {8 * 200:,} output tokens" in shown
    assert "refused" in shown.splitlines()[4]
    assert "62.5%" in shown.splitlines()[5]
    said = " ".join(shown.splitlines()[8:]).strip()
    assert said.startswith("5 of 8 requests were refused under full and are in no other figure: 2 fit no replica")
    assert "3 found all queues full (cluster.replicas, max_queued_requests," in said
    (figures,) = replayed(path, *options)
    assert (figures["refused"], figures["too_large"]) == (5, 2)


def test_over_vllm_a_ttl_changes_no_more_than_bills(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(record(600.0 * n, [1] * 200).to_json() + "\n" for n in range(4)))
    shown = call("replay", path, "--ttl", 300, "--ttl", 3600, "--set", "engine.kind=vllm").stdout
    assert "hit: prompt tokens found, and within their TTL;" in shown
    assert shown.splitlines()[-1].endswith("; vLLM computes and holds the same.")


def test_memory_without_hits_is_told(tmp_path):
    """Prompts that nobody repeats: an hour keeps what five minutes have let go, for nothing."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(record(400.0 * n, [n] * 200).to_json() + "\n" for n in range(4)))
    last = call("replay", path, "--ttl", 300, "--ttl", 3600, "--policy", "full").stdout.splitlines()[-1]
    assert last.startswith("TTL 1h instead of 5m: the same hit rate for 4.0x memory")


def test_it_says_so_where_nothing_can_be_concluded(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(record(10.0 * n, [n] * 200).to_json() + "\n" for n in range(4)))
    options = ("--ttl", 300, "--ttl", 3600, "--policy", "full")
    assert call("replay", path, *options).stdout.splitlines()[-1].startswith("Nothing can be concluded")
    assert len({v["token_hit_rate"] for v in replayed(path, *options)}) == 1
    recorded = call("replay", path, "--as-recorded", "--ttl", 60, "--policy", "full").stdout.splitlines()[-1]
    assert recorded == "Nothing can be concluded: no two variants differ in the TTL or in the policy alone."


def replayed(path, *options):
    return json.loads(call("replay", path, *options, "--json").stdout)["variants"]


def test_lifetimes_are_written_as_elsewhere(log):
    options = ("--ttl", "60", "--ttl", "5m, 1h", "--ttl", "unlimited", "--policy", "full")
    assert [variant["ttl"] for variant in replayed(log, *options)] == [60, 300, 3600, "unlimited"]
    result = call("replay", log, *options, "--details")
    assert result.exit_code == 0, result.output
    assert result.stdout.count(" unlimited ") >= 4


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


@pytest.mark.parametrize("how", ["simulator.batching=mixed", "engine.kind=vllm"])
def test_a_cluster_of_vllm_servers_is_replayed_with_the_whole_cache(log, how):
    mixed = ("--set", how, "--set", "cluster.replicas=2", "--set", "engine.max_slots=16")
    document = json.loads(call("replay", log, *mixed, "--json", "-").stdout)
    assert [(variant["policy"], variant["ttl"]) for variant in document["variants"]] == [("full", 300), ("full", 3600)]
    assert all(variant["token_hit_rate"] > 0 for variant in document["variants"])
    result = call("replay", log, *mixed, "--policy", "snapkv")
    assert result.exit_code == 2
    assert "simulator.batching=mixed keeps the whole cache" in result.stderr


def test_vllm_s_cache_in_fp8_is_replayed_as_it_is(log):
    fp8 = ("engine.kind=vllm", "prefix_cache.storage=fp8", "compression.policy=full+fp8")
    options = [part for setting in fp8 for part in ("--set", setting)]
    document = json.loads(call("replay", log, *options, "--ttl", 60, "--json", "-").stdout)
    assert [variant["policy"] for variant in document["variants"]] == ["full+fp8"]


def test_json_goes_to_a_file_beside_the_table(log, tmp_path):
    out = tmp_path / "out.json"
    result = call("replay", log, "--ttl", 60, "--policy", "full", "--json", out)
    assert result.exit_code == 0, result.output
    assert "this is one variant" in result.stdout
    assert len(json.loads(out.read_text())["variants"]) == 1


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "cannot read"),
        ("", [], "is empty"),
        ("{\n[]\n", [], "is of no format that is recognised"),
        ("{\n", ["--format", "warmkv"], "has no request to replay; it was read as warmkv"),
        ("{\n", ["--format", "warmkv", "--strict"], ":1: not JSON"),
        ("GOOD", ["--ttl", "0"], "a TTL must be a positive number of seconds"),
        ("GOOD", ["--ttl", "-1"], "'-1' is no time"),
        ("GOOD", ["--ttl", "soon"], "'soon' is no time"),
        ("GOOD", ["--ttl", ","], "--ttl is empty"),
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
    loaded = modules_after("import warmkv.cli.simulating.replay")
    assert not loaded & {"torch", "ray", "transformers", "fastapi", "numpy", "simpy"}


def test_a_replay_loads_neither_torch_nor_ray(log):
    loaded = modules_after(
        f"sys.argv = ['x', 'replay', {str(log)!r}]; from warmkv.cli import app; app(standalone_mode=False)"
    )
    assert "simpy" in loaded
    assert not loaded & {"torch", "ray", "transformers", "fastapi"}


def rows(*documents):
    return "".join(json.dumps(document) + "\n" for document in documents)


MOONCAKE = rows(
    *({"timestamp": 1000 * n, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3 + n]} for n in range(6))
)
SESSION = rows(
    {"id": "a", "block_size": 64, "requests": [
        {"t": n, "in": 64 * n + 70, "out": 20, "hash_ids": list(range(n + 1)), "think_time": 3.0} for n in range(4)
    ]}
)  # fmt: skip
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,10\n2023-11-16 18:17:04.03,310,8\n"


@pytest.mark.parametrize(
    ("content", "requests", "hit", "told"),
    [
        (MOONCAKE, 6, 5 * 1024 / 6600, "arrivals as recorded"),
        (SESSION, 4, (64 + 128 + 192) / (4 * 70 + 6 * 64), "turns follow the answers before them"),
        (AZURE, 2, 0, "arrivals as recorded"),
    ],
)
def test_traces_of_other_services_are_replayed(tmp_path, content, requests, hit, told):
    path = tmp_path / "trace"
    path.write_text(content)
    result = call("replay", path, "--ttl", 60, "--policy", "full")
    assert result.exit_code == 0, result.output
    assert f"{requests} requests over" in result.stdout
    assert told in result.stdout
    assert ("has no blocks" in result.stderr) == (content is AZURE)
    (variant,) = json.loads(call("replay", path, "--ttl", 60, "--policy", "full", "--json").stdout)["variants"]
    assert (variant["requests"], variant["refused"]) == (requests, 0)
    assert variant["figures"]["hit_rate_tokens"] == pytest.approx(hit)


def test_an_open_loop_takes_the_recorded_times(tmp_path):
    path = tmp_path / "trace"
    path.write_text(SESSION)
    seconds = []
    for options in ([], ["--open"]):
        document = json.loads(call("replay", path, "--ttl", 60, "--policy", "full", "--json", "-", *options).stdout)
        seconds.append(document["variants"][0]["seconds"])
    assert seconds[0] > 9 > seconds[1]


def test_a_run_is_written_as_a_folder(tmp_path):
    pytest.importorskip("pyarrow")
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "trace", tmp_path / "run"
    path.write_text(MOONCAKE)
    result = call("replay", path, "--out", out, "--set", "cluster.replicas=2", "--set", "simulator.slo.ttft=.inf")
    assert result.exit_code == 0, result.output
    names = {"meta.json", "summary.json", "requests.parquet", "timeseries.parquet", "report.html"}
    assert {file.name for file in out.iterdir()} == names
    meta = json.loads((out / "meta.json").read_text(), parse_constant=pytest.fail)
    assert meta["trace"] | {"format": "mooncake", "requests": 6, "broken": 0} == meta["trace"]
    assert meta["config"]["cluster"]["replicas"] == 2
    assert meta["variant"] == {"policy": "as recorded", "ttl": None}
    assert json.loads((out / "summary.json").read_text())["requests"] == 6
    again = call("replay", path, "--out", out)
    assert again.exit_code == 2
    assert "choose another --out" in again.stderr.replace("\n", " ")

    grid = tmp_path / "grid"
    assert call("replay", path, "--out", grid, "--ttl", 60, "--policy", "snapkv", "--budget", 0.2).exit_code == 0
    assert {folder.name for folder in grid.iterdir()} == {"full_ttl60", "snapkv@0.2_ttl60"}
    assert all({file.name for file in folder.iterdir()} == names for folder in grid.iterdir())

    same = ("--ttl", "60m,1h", "--policy", "snapkv", "--budget", "0.2", "--budget", ".2")
    result = call("replay", path, "--out", tmp_path / "same", *same)
    assert result.exit_code == 0, result.output
    assert {folder.name for folder in (tmp_path / "same").iterdir()} == {"full_ttl3600", "snapkv@0.2_ttl3600"}
    assert call("replay", path, "--out", tmp_path / "one", "--ttl", "60m,1h", "--policy", "full").exit_code == 0
    assert {file.name for file in (tmp_path / "one").iterdir()} == names


def test_a_folder_needs_its_libraries(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    for module in ("pyarrow", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    result = call("replay", path, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "--out needs pyarrow and matplotlib; install with: pip install 'warmkv[eval]'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_scope_that_the_trace_does_not_tell_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    result = call("replay", path, "--scope", "session")
    assert result.exit_code == 2
    assert "does not tell the session" in result.stderr


def test_the_catalogue_of_gpus_is_shown_without_a_trace():
    result = call("replay", "--gpu", "list")
    assert result.exit_code == 0, result.output
    for name in CATALOGUE:
        assert f"{name} " in result.stdout


def test_a_model_on_a_gpu_gives_the_step_times(log, tmp_path):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, "dtype": "float16"}))
    arguments = ["replay", log, "--ttl", 60, "--policy", "full", "--model", tmp_path, "--json", "-"]
    result = call(*arguments, "--gpu", "L4")
    assert result.exit_code == 0, result.output
    step_times = json.loads(result.stdout)["step_times"]
    assert step_times["source"].startswith("roofline of ")
    assert (step_times["gpu"]["name"], step_times["model"]["layers"]) == ("L4", 2)
    result = call(*arguments, "--gpu", "L5")
    assert result.exit_code == 2
    assert "no GPU 'L5' in the catalogue; did you mean 'L4'" in result.stderr.replace("\n", " ")

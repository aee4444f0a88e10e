"""`warmkv plan`: its choice on a part of a trace that it has not seen, the overlay it writes, and its refusals."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.html import Page
from tests.unit.simulator.published import published
from warmkv import __version__
from warmkv.cli import app
from warmkv.config import load
from warmkv.platform.kubernetes.overlay import write_overlay
from warmkv.platform.kubernetes.rendered import read, render
from warmkv.simulator.studies.plans.deployment import Deployment

ROOT = Path(__file__).parents[3]
MODEL = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
}  # fmt: skip
SLO = "ttft_p99<1,tpot_p99<0.05"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def lines(count: int, rate: float, seed: int = 1) -> list[str]:
    """Return prompts that share a first block of ten, at nearly even gaps: one half of it is like the other."""
    draw, at, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at += draw.uniform(0.8, 1.2) / rate
        blocks = [draw.randrange(10), *(100 + 8 * number + block for block in range(draw.randrange(4, 6)))]
        row = {"timestamp": int(1000 * at), "input_length": 512 * len(blocks), "output_length": draw.randrange(60, 80)}
        rows.append(json.dumps({**row, "hash_ids": blocks}))
    return rows


def halves(rows: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Split a trace by time: what is planned with, and what is held back."""
    times = [json.loads(row)["timestamp"] for row in rows]
    files = folder / "seen.jsonl", folder / "held_back.jsonl"
    for file, late in zip(files, (False, True), strict=True):
        part = [row for row, time in zip(rows, times, strict=True) if (time >= max(times) / 2) is late]
        file.write_text("\n".join(part))
    return files


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return halves(lines(400, rate=30), tmp_path_factory.mktemp("trace"))


def replayed(trace: Path, model: Path, chosen: dict[str, Any], replicas: int) -> dict[str, float]:
    """Return the figures of a deployment on another trace, by `warmkv replay`."""
    gpu, settings = chosen["gpu"], {**chosen["choice"], "cluster.replicas": replicas, "cluster.gpus_per_replica": 1}
    policy = settings.pop("compression.policy", "full")
    flags = [part for path, value in settings.items() for part in ("--set", f"{path}={value}")]
    options = ["--model", model, "--gpu", gpu, "--policy", policy, "--ttl", 300, "--json"]
    done = call("replay", trace, *options, *flags)
    assert done.exit_code == 0, done.output
    figures: dict[str, float] = json.loads(done.stdout)["variants"][0]["figures"]
    return figures


def meets(figures: dict[str, float], ttft_p99: float, tpot_p99: float) -> bool:
    return figures["ttft_p99"] < ttft_p99 and figures["tpot_p99"] < tpot_p99 and figures["refused"] == 0


def test_the_choice_holds_on_what_was_held_back_and_one_fewer_does_not(
    model: Path, trace: tuple[Path, Path], tmp_path: Path
) -> None:
    seen, held_back = trace
    done = call("plan", "--model", model, "--gpu", "H100", "--gpu", "L40S", "--slo", SLO, "--trace", seen, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    chosen = document["chosen"]
    assert chosen["replicas"] > 1
    assert meets(replayed(held_back, model, chosen, chosen["replicas"]), 1.0, 0.05)
    assert not meets(replayed(held_back, model, chosen, chosen["replicas"] - 1), 1.0, 0.05)
    assert [one["gpu"] for one in document["gpus"]] == ["H100-SXM", "L40S"]
    dollars = {one["gpu"]: one["price"]["dollars_hour"] for one in document["gpus"]}[chosen["gpu"]]
    assert chosen["dollars_month"] == pytest.approx(chosen["replicas"] * dollars * 730)


@pytest.mark.soak(least=0.5)
def test_the_choice_holds_on_a_public_trace(model: Path, tmp_path: Path) -> None:
    seen, held_back = halves(published("mooncake_conversation.jsonl").read_text().splitlines(), tmp_path)
    slo = "ttft_p99<10,tpot_p99<0.1"
    done = call("plan", "--model", model, "--slo", slo, "--trace", seen, "--set", "engine.max_slots=256", "--json")
    chosen = json.loads(done.stdout)["chosen"]
    chosen["choice"]["engine.max_slots"] = 256
    assert meets(replayed(held_back, model, chosen, chosen["replicas"]), 10, 0.1)
    assert not meets(replayed(held_back, model, chosen, chosen["replicas"] - 1), 10, 0.1)


def test_the_overlay_that_it_writes_passes_the_check(model: Path, trace: tuple[Path, Path], tmp_path: Path) -> None:
    """Settings, their Serve document, a worker group with room for the replicas; and a report beside it."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    out, report = tmp_path / "k8s/overlays/mine", tmp_path / "plan.html"
    options = ["--model", model, "--slo", SLO, "--trace", trace[0], "--set", "cluster.drain_seconds=100"]
    done = call("plan", *options, "--out", out, "--report", report, "--json", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    chosen = json.loads((tmp_path / "plan.json").read_text())["chosen"]
    settings = yaml.safe_load((out / "warmkv.yaml").read_text())
    assert settings["cluster"] == {"replicas": chosen["replicas"], "drain_seconds": 100.0, "gpus_per_replica": 1.0}
    assert settings["model"] == {"path": str(model)}
    assert "simulator" not in settings
    page = Page()
    page.feed(report.read_text())
    assert page.tags["svg"] == 2
    assert max(page.ids.values()) == 1
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    checked = call("k8s", "check", out, "--json")
    assert checked.exit_code == 0, checked.output
    findings = json.loads(checked.stdout)["findings"]
    assert {finding["level"] for finding in findings} == {"note"}
    assert {finding["rule"] for finding in findings} == {"references", "budgets"}  # of the head, which is alone
    again = call("plan", *options, "--out", out)
    assert again.exit_code == 0, "an overlay may be written anew"
    assert "drain_seconds" in (out / "serve-config.yaml").read_text()
    screen = again.stdout
    assert "H100-SXM*" in screen
    assert "memory of a replica on H100-SXM" in screen
    assert "One replica fewer has ttft_p99" in screen


def test_an_overlay_has_room_for_the_replicas_of_all_groups(model: Path, tmp_path: Path) -> None:
    """Add two replicas that keep prefixes in host memory to three that do not."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    out = tmp_path / "k8s/overlays/mine"
    groups = "cluster.groups={long: {cluster: {replicas: 2}, prefix_cache: {host: {memory_bytes: 64GiB}}}}"
    planned = Deployment.of(str(model), lambda *flags: load(flags=[groups, *flags], environ={}))
    chosen = {"simulator.gpu": "H100", "cluster.replicas": 3}
    write_overlay(out, tmp_path / "k8s/base", planned.configure, chosen, planned.shape, [])
    changes = yaml.safe_load((out / "workers.yaml").read_text())
    workers = {change["path"].rpartition("/")[2]: change["value"] for change in changes}
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (5, 5, 5)
    assert int(workers["memory"].removesuffix("Gi")) > 64
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    findings = json.loads(call("k8s", "check", out, "--json").stdout)["findings"]
    assert {finding["rule"] for finding in findings} == {"references", "budgets"}


def test_groups_keep_their_replicas_and_are_told(model: Path, trace: tuple[Path, Path]) -> None:
    """Hold groups to the replicas that settings give them, whatever number is tried, without autoscaling."""
    scaling = "{min_replicas: 1, max_replicas: 9}"
    groups = (
        f"cluster.groups={{b: {{engine: {{max_slots: 8}}}}, c: {{cluster: {{replicas: 2, autoscaling: {scaling}}}}}}}"
    )
    planned = Deployment.of(str(model), lambda *flags: load(flags=[groups, *flags], environ={}))
    config = planned.configure(["cluster.replicas=5"])
    assert {name: group.cluster.most_replicas for name, group in config.groups().items()} == {"": 5, "b": 1, "c": 2}
    done = call("plan", "--model", model, "--slo", SLO, "--trace", trace[0], "--set", groups, "--json")
    document = json.loads(done.stdout)
    assert document["chosen"]["dollars_month"] == pytest.approx((document["chosen"]["replicas"] + 3) * 3 * 730)
    assert "That has 2 replicas of group c beside them, and their cost." in document["why"]


def test_an_overlay_for_vllm_has_its_image_and_shared_memory(model: Path, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    out = tmp_path / "k8s/overlays/mine"
    planned = Deployment.of(str(model), lambda *flags: load(flags=["engine.kind=vllm", *flags], environ={}))
    chosen = {"simulator.gpu": "H100", "cluster.replicas": 1}
    write_overlay(out, tmp_path / "k8s/base", planned.configure, chosen, planned.shape, [])
    (service,) = read(render(out), {}).services
    (worker,) = service.workers
    assert worker.box["image"] == f"warmkv:{__version__}-vllm"
    assert worker.volume({"name": "shm"}) == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert worker.limit("memory") > 16 << 30  # which counts it
    findings = json.loads(call("k8s", "check", out, "--json").stdout)["findings"]
    assert {finding["level"] for finding in findings} == {"note"}


def test_policies_are_chosen_if_their_quality_allows_it(model: Path, trace: tuple[Path, Path], tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"task": "t", "variant": "", "length": 1000, "depth": 0.5, "sample": 0, "policy": policy, "share": share,
         "score": score, "budget": int(share * 1000), "prompt_tokens": 1000}
        for policy, share, score in [("full", 1.0, 1.0), ("snapkv", 0.1, 0.8), ("snapkv", 0.3, 1.0)]
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "results.parquet")
    tight = ["--set", "engine.kv_bytes=4GiB", "--set", "prefix_cache.memory_bytes=1GiB"]  # slots are what is short
    options = ["--model", model, "--slo", "ttft_p99<1", "--trace", trace[0], *tight, "--json"]
    plain = json.loads(call("plan", *options).stdout)
    assert plain["chosen"]["figures"]["quality"] == 1.0
    assert plain["cheaper"][-1]["choice"]["compression.policy"] == "snapkv@0.2"
    assert plain["cheaper"][-1]["misses"] == ["quality unknown"]
    measured = json.loads(call("plan", *options, "--eval", tmp_path).stdout)
    assert measured["chosen"]["choice"]["compression.policy"] == "snapkv@0.296"
    assert 0.99 < measured["chosen"]["figures"]["quality"] < 1
    assert measured["chosen"]["dollars_month"] < plain["chosen"]["dollars_month"]


def test_an_slo_that_nothing_meets_ends_with_the_nearest(model: Path, trace: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "overlays" / "mine"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "kustomization.yaml").write_text("")
    slo = "ttft_p50<0.001"
    done = call("plan", "--model", model, "--slo", slo, "--trace", trace[0], "--max-replicas", 2, "--out", out)
    assert done.exit_code == 1
    assert "No deployment that was tried meets the SLO; the nearest" in done.stdout
    assert not out.exists()


def test_a_profile_is_of_its_gpu(model: Path, trace: tuple[Path, Path], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    for flag in (f"L4={profile}", "H200=x.json"):
        done = call("plan", "--model", model, "--slo", SLO, "--trace", trace[0], "--profile", flag)
        assert done.exit_code == 2
        assert "write GPU=FILE, with a GPU that --gpu names (H100-SXM)" in done.stderr
    done = call("plan", "--model", model, "--slo", SLO, "--trace", trace[0], "--profile", profile)
    assert done.exit_code == 2
    assert f"cannot read {profile}" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--slo", "ttft<1"], "--slo ttft: unknown figure"),
        (["--gpu", "H300"], "no GPU 'H300' in the catalogue"),
        (["--gpu", "{name: H100, dollar: 2}"], "did you mean 'dollars'"),
        (["--gpu", "H100", "--gpu", "{name: H100, dollars: 2}"], "--gpu H100-SXM: given twice"),
        (["--host-memory", "much"], "--host-memory much: write bytes as in 8GiB"),
        (["--model", "nobody/knows-it"], "download its config.json"),
        (["--out", "overlays/mine"], "there is no kustomize base"),
        (
            ["--out", "overlays/mine", "--set", "cluster.groups={b: {cluster: {gpus_per_replica: 0.5}}}"],
            "cluster.groups.b.cluster.gpus_per_replica needs pods of its own",
        ),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
        (["--eval", "absent"], "cannot read absent"),
        (["--peer"], "--peer needs the command aiconfigurator"),
    ],
)
def test_what_cannot_be_planned_is_refused(model: Path, trace: tuple[Path, Path], flags: list[str], says: str) -> None:
    done = call("plan", "--model", model, "--slo", SLO, "--trace", trace[0], *flags)
    assert done.exit_code == 2
    assert says in done.stderr


def test_a_price_of_ones_own_decides(model: Path, trace: tuple[Path, Path]) -> None:
    options = ["--model", model, "--slo", SLO, "--trace", trace[0], "--json"]
    done = call("plan", *options, "--gpu", "{name: H100, dollars: 0.1}", "--gpu", "L40S")
    chosen = json.loads(done.stdout)["chosen"]
    assert chosen["gpu"] == "H100-SXM"
    assert chosen["dollars_month"] == pytest.approx(chosen["replicas"] * 73)


def test_settings_hold_throughout(model: Path, trace: tuple[Path, Path], tmp_path: Path) -> None:
    """Take the GPU, its price, the slots and the policy of the settings, and try no others."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {"task": "t", "variant": "", "length": 1000, "depth": 0.5, "sample": 0, "prompt_tokens": 1000, "score": 1.0}
    measured = [("full", 1.0), ("snapkv", 0.3), ("snapkv", 0.5)]
    rows = [{**row, "policy": name, "share": share, "budget": int(1000 * share)} for name, share in measured]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "results.parquet")
    settings = ["simulator.gpu.dollars=0.1", "engine.max_slots=32", "compression.policy=snapkv@0.4"]
    flags = [part for setting in settings for part in ("--set", setting)]
    options = ["--model", model, "--slo", "ttft_p99<1", "--trace", trace[0], "--eval", tmp_path, "--json"]
    document = json.loads(call("plan", *options, *flags).stdout)
    assert document["chosen"]["dollars_month"] == pytest.approx(document["chosen"]["replicas"] * 73)
    assert {path.partition(".")[0] for one in document["trials"] for path in one["choice"]} == {"prefix_cache"}
    document = json.loads(call("plan", *options, "--set", "simulator.gpu=L4", "--max-replicas", 1).stdout)
    assert [one["gpu"] for one in document["gpus"]] == ["L4"]


def test_a_profile_of_the_settings_is_read_and_is_of_one_gpu(model: Path, trace: tuple[Path, Path]) -> None:
    options = ["--model", model, "--slo", SLO, "--trace", trace[0], "--set", "simulator.profile=/absent.json"]
    assert "cannot read /absent.json" in call("plan", *options).stderr
    for more in (["--profile", "H100=other.json"], ["--gpu", "H100", "--gpu", "L4"]):
        done = call("plan", *options, *more)
        assert done.exit_code == 2
        assert "simulator.profile is of one GPU" in done.stderr

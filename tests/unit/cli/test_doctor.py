"""`warmkv doctor` tells what `warmkv serve` would refuse, goes on with the rest, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from warmkv.cli import app
from warmkv.config import load
from warmkv.extras import EXTRAS
from warmkv.platform import serving
from warmkv.platform.local import StartError
from warmkv.platform.tenants import hash_key
from warmkv.replicas.block_store import Identity, disk
from warmkv.replicas.loading.load import load_model

FREE_PORT = "gateway.port=0"


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMKV_SALT", "secret")


def run(*settings: str, metrics_port: int = 0) -> Result:
    flags = (part for setting in (FREE_PORT, *settings) for part in ("--set", setting))
    return CliRunner().invoke(app, ["doctor", "--json", "--metrics-port", str(metrics_port), *flags])


def test_it_checks_the_model_and_plans_its_memory():
    found = json.loads(run().stdout)
    assert {finding["state"] for finding in found} == {"ok"}
    named = [finding["what"] for finding in found]
    assert named[-4:] == ["device", "model", "memory plan", "self-check"]


def test_it_lists_every_extra_where_one_is_missing(monkeypatch):
    for module in ("ray", "optuna"):
        monkeypatch.setitem(sys.modules, module, None)
    result = run()
    assert result.exit_code == 1
    found = {finding["what"]: finding for finding in json.loads(result.stdout)}
    assert set(found) == {"python", *(f"extra {name}" for name in EXTRAS if name not in ("vllm", "flash"))}
    assert "ray: pip install 'warmkv[serve]'" in found["extra serve"]["detail"]
    assert found["extra tune"]["state"] == "missing"


def doctor(*settings: str, metrics_port: int = 0) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the exit code, and by name the state and detail of what was looked at."""
    result = run(*settings, metrics_port=metrics_port)
    return result.exit_code, {one["what"]: (one["state"], one["detail"]) for one in json.loads(result.stdout)}


@pytest.mark.parametrize(
    ("setting", "module", "extra"),
    [
        ("engine.kind=vllm", "vllm", "vllm"),
        ("cluster.groups.fast.engine.kind=vllm", "vllm", "vllm"),
        ("control.whatif.quality=evaluated", "pyarrow", "eval"),
    ],
)
def test_what_the_settings_need_is_no_option(monkeypatch, setting, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    assert run().exit_code == 0
    code, found = doctor(setting)
    assert code == 1
    assert [what for what, (state, _) in found.items() if state == "failed"] == [f"extra {extra}"]
    assert f"lacks {module}" in found[f"extra {extra}"][1]


def test_a_model_for_vllm_is_left_to_it():
    """Look at what its replicas look at: the model may be none that warmkv's own engine can load."""
    _, found = doctor("engine.kind=vllm", "engine.kv_bytes=1MiB", "engine.max_context=1024")
    assert (found["model"][0], found["memory plan"][0], "self-check" in found) == ("ok", "ok", False)
    assert "6 layers, context 1,024 tokens; for vLLM" in found["model"][1]
    assert doctor("engine.kind=vllm", "engine.max_context=1000000")[1]["model"][0] == "failed"


def test_every_group_has_a_memory_plan_of_its_own():
    """Plan groups of either kind of engine, beside settings of either."""
    large, fast = "cluster.groups.large.engine.kv_bytes=1PiB", "cluster.groups.fast.engine.kind=vllm"
    code, found = doctor(large, fast, "engine.kv_bytes=1MiB")
    assert (code, [what for what, (state, _) in found.items() if state == "failed"][-1]) == (1, "memory plan of large")
    assert "needed 1,125,899" in found["memory plan of large"][1]
    assert [found[f"memory plan{of}"][0] for of in ("", " of fast")] == ["ok", "ok"]
    assert found["self-check"][0] == "ok"
    _, found = doctor("engine.kind=vllm", "cluster.groups.own.engine.kind=warmkv", "engine.kv_bytes=1MiB")
    assert found["memory plan of own"][0] == "ok"


DISK = "prefix_cache.disk.memory_bytes=1MiB"
OF_GROUP = "cluster.groups.small.prefix_cache.disk={memory_bytes: 1MiB, path: {}}"


@pytest.mark.parametrize(
    ("settings", "what", "says"),
    [
        (["gateway.host=0.0.0.0"], "listening", "0.0.0.0 is reached from other machines"),
        (
            ["gateway.tenants_file={}/none.yaml"],
            "tenants",
            "none.yaml (gateway.tenants_file): it cannot be read: No such",
        ),
        (["gateway.tenants_file={}/file"], "tenants", "file (gateway.tenants_file): expected a mapping with `tenants`"),
        (["gateway.access_log={}/file/log"], "access log", "file (gateway.access_log): File exists"),
        (["gateway.access_log={}"], "access log", "(gateway.access_log): Is a directory"),
        (["control.path={}/file"], "versions", "file (control.path): File exists"),
        (["prefix_cache.disk.path={}/file/blocks", DISK], "disk tier", "(prefix_cache.disk.path): Not a directory"),
        (
            [DISK, "prefix_cache.disk.path={}/blocks", OF_GROUP.replace("{}", "{}/file/blocks")],
            "disk tier of small",
            "(cluster.groups.small.prefix_cache.disk.path): Not a directory",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_it_tells_what_serve_would_refuse_and_looks_at_the_rest(tmp_path: Path, settings, what, says):
    (tmp_path / "file").write_text("no tenants\n")
    code, found = doctor(*(setting.replace("{}", str(tmp_path)) for setting in settings))
    assert code == 1
    assert [name for name, (state, _) in found.items() if state != "ok"] == [what]
    assert says in found[what][1]
    assert "self-check" in found


def test_it_leaves_no_log_and_no_folder_of_versions_behind(tmp_path: Path):
    (tmp_path / "tenants.yaml").write_text(f"tenants: [{{name: a, key_sha256: {hash_key('a key')}}}]\n")
    code, found = doctor(
        "gateway.host=0.0.0.0",
        f"gateway.tenants_file={tmp_path}/tenants.yaml",
        f"gateway.access_log={tmp_path}/logs/today/access.jsonl",
        f"control.path={tmp_path}/versions",
        f"prefix_cache.disk.path={tmp_path}/blocks",
        DISK,
        OF_GROUP.replace("{}", f"{tmp_path}/small/blocks"),
    )
    assert code == 0, found
    assert found["tenants"] == ("ok", "tenants: 1, operators: 0")
    assert found["disk tier"] == ("ok", f"{tmp_path}/blocks/0 can be written")
    assert found["disk tier of small"] == ("ok", f"{tmp_path}/small/blocks/0 can be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tenants.yaml"]


def test_it_leaves_the_blocks_of_a_disk_tier_alone(tmp_path: Path):
    settings = f"prefix_cache.disk.path={tmp_path}/blocks", DISK
    config = load(flags=settings, environ={})
    model = load_model(config.model)
    folder = disk.claim(tmp_path / "blocks", Identity.of(model, config.prefix_cache.block_size), "model")
    block, notes = folder.file(bytes(16)), folder.path / "notes.txt"
    block.parent.mkdir()
    block.write_bytes(b"cut short")  # a replica that started would remove it
    notes.write_text("of somebody else")
    folder.release()
    for file in (block, notes):
        before = file.read_bytes()
        _, found = doctor(*settings)
        assert found["disk tier"] == ("ok", f"{folder.path} can be written")
        assert file.read_bytes() == before
        block.unlink(missing_ok=True)


def test_it_tells_packs_that_no_request_could_read(tmp_path: Path, monkeypatch):
    (tmp_path / "text").write_text("The handbook says that every block has a name. " * 40)
    built = ["packs", "build", f"{tmp_path}/pack", "--tenant", "a key", "--system", f"{tmp_path}/text"]
    assert CliRunner().invoke(app, built).exit_code == 0
    pack = f"packs: [{tmp_path}/pack]"
    code, found = doctor(f"prefix_cache={{{pack}}}")
    assert (code, found["packs"], found["self-check"][0]) == (0, ("ok", "1 can be read by tenants"), "ok")
    monkeypatch.setenv("WARMKV_SALT", "another")
    code, found = doctor(f"cluster.groups.small.prefix_cache={{{pack}}}")
    assert (code, found["packs of small"][0]) == (1, "failed")
    assert "it was built with another WARMKV_SALT" in found["packs of small"][1]
    assert "packs" not in found


@pytest.mark.parametrize("place", ["", "cluster.groups.small."])
def test_a_disk_tier_without_a_salt_is_warned_of(tmp_path: Path, monkeypatch, place):
    settings = f"{place}prefix_cache.disk={{memory_bytes: 1MiB, path: {tmp_path}/blocks}}"
    says = "WARMKV_SALT is not set, so hashes are salted anew at every start"

    def stop(*_: object, **__: object) -> None:
        raise StartError("this far")

    def serve(*flags: str) -> str:
        result = CliRunner().invoke(app, ["serve", *flags])
        assert "this far" in result.stderr
        return result.stderr.replace("\n", " ")

    monkeypatch.setattr(serving, "running", stop)
    assert "salt" not in doctor(settings)[1]
    assert says not in serve("--set", settings)
    monkeypatch.delenv("WARMKV_SALT")
    code, found = doctor(settings)
    assert (code, found["salt"][0], found["salt"][1].startswith(says)) == (0, "missing", True)
    assert says in serve("--set", settings)
    assert says not in serve()


def test_it_finds_ports_that_are_taken():
    with socket.create_server(("127.0.0.1", 0)) as gateway, socket.create_server(("0.0.0.0", 0)) as metrics:
        taken, shown = (one.getsockname()[1] for one in (gateway, metrics))
        code, found = doctor(f"gateway.port={taken}", metrics_port=shown)
    assert code == 1
    says = "Address already in use; 0 takes a free port"
    assert found["listening"] == ("failed", f"127.0.0.1:{taken} (gateway.host, gateway.port): {says}")
    assert found["metrics"] == ("failed", f"0.0.0.0:{shown} (--metrics-port): {says}")
    assert found["self-check"][0] == "ok"
    code, found = doctor(f"gateway.port={taken}", metrics_port=shown)
    assert (code, found["listening"][0], found["metrics"]) == (0, "ok", ("ok", f"port {shown} is free"))


def test_serve_tells_a_metrics_port_that_is_taken_before_it_starts_ray():
    with socket.create_server(("0.0.0.0", 0)) as metrics:
        port = metrics.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", "0", "--metrics-port", str(port)])
    assert result.exit_code == 1
    assert f"0.0.0.0:{port} (--metrics-port): Address already in use" in result.stderr


def test_it_keeps_a_log_that_is_there(tmp_path: Path):
    (tmp_path / "access.jsonl").write_text("{}\n")
    code, _ = doctor(f"gateway.access_log={tmp_path}/access.jsonl")
    assert code == 0
    assert (tmp_path / "access.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("flag", "what", "says"),
    [
        ("model.path=/nowhere", "model", "/nowhere"),
        ("engine.kv_bytes=1PiB", "memory plan", "needed 1,125,899"),
    ],
)
def test_it_says_what_fails_and_ends_with_1(flag, what, says):
    result = run(flag)
    assert result.exit_code == 1
    last = json.loads(result.stdout)[-1]
    assert (last["what"], last["state"]) == (what, "failed")
    assert says in last["detail"]


def test_it_says_that_there_is_no_gpu(monkeypatch):
    """A group's is told beside the rest; without that of the settings nothing can be looked at."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, found = doctor("cluster.groups.fast.model.device=cuda")
    assert code == 1
    assert found["device of fast"] == ("failed", "torch finds no GPU for device cuda; try cpu")
    assert found["self-check"][0] == "ok"
    code, found = doctor("model.device=cuda:1")
    assert (code, list(found)[-1]) == (1, "device")
    assert found["device"] == ("failed", "torch finds no GPU for device cuda:1; try cpu")

"""Packs from the command line to a request that reads them through the real client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.platform.gateway.apis.test_messages import ask, marked, plain
from warmkv.cli import app

DOCUMENT = "The handbook says that every block has a name.\n" * 60
SYSTEM = "Answer from the handbook only, in one sentence. " * 20


def packs(*args: object, salt: str = "secret"):
    return CliRunner().invoke(app, ["packs", *map(str, args)], env={"WARMKV_SALT": salt})


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    (folder / "system.txt").write_text(SYSTEM)
    (folder / "document.txt").write_text(DOCUMENT)
    for name, documents in (("handbook", ["--document", folder / "document.txt"]), ("system", [])):
        result = packs(
            "build",
            folder / name,
            "--tenant",
            "alice",
            "--tenant",
            "bob",
            "--system",
            folder / "system.txt",
            *documents,
        )
        assert result.exit_code == 0, result.output
    return folder / "handbook"


def test_the_tenants_of_a_pack_read_it_from_the_first_request_on(serve, pack):
    server = serve("engine.threads=1", f"prefix_cache.packs=[{pack}]")
    content = [marked(DOCUMENT), plain("What has a name?")]
    cold = ask(serve("engine.threads=1", "prefix_cache.enabled=false"), content, system=SYSTEM)
    for key in ("alice", "bob"):
        answer = ask(server, content, key=key, system=SYSTEM)
        assert answer.usage.cache_read_input_tokens > 0.9 * (
            answer.usage.cache_read_input_tokens + answer.usage.input_tokens
        )
        assert answer.usage.cache_creation_input_tokens == 0
        assert answer.content[0].text == cold.content[0].text
    stranger = ask(server, content, key="carol", system=SYSTEM)
    assert stranger.usage.cache_read_input_tokens == 0


def test_packs_are_neither_evicted_nor_forgotten(serve, pack):
    now = [0.0]
    room = int(1.2 * json.loads((pack / "manifest.json").read_text())["bytes"])
    settings = [f"prefix_cache.packs=[{pack}]", f"prefix_cache.memory_bytes={room}"]
    server = serve("engine.threads=1", *settings, clock=lambda: now[0])
    for number in range(4):
        ask(server, f"{number}: " + "something else entirely. " * 100, max_tokens=1)
    now[0] = 1e6
    ask(server, "and later", max_tokens=1)
    before = server.engine.store._packed_keys
    label = server.requests[-1].tenant
    freed = server.engine.drop_prefixes(label).result(30)
    assert freed >= 0
    assert before <= {key for run in server.engine.store.tree.recent(0) for key in run.keys}
    answer = ask(server, [marked(DOCUMENT), plain("What has a name?")], system=SYSTEM)
    assert answer.usage.cache_read_input_tokens > 0


def test_a_pack_goes_to_host_memory_where_the_device_has_no_room(serve, pack):
    server = serve(
        "engine.threads=1",
        f"prefix_cache.packs=[{pack}]",
        "prefix_cache.memory_bytes=100KB",
        "prefix_cache.host.memory_bytes=64MiB",
    )
    answer = ask(server, [marked(DOCUMENT), plain("What has a name?")], system=SYSTEM)
    assert answer.usage.cache_read_input_tokens > 0
    assert server.engine.stats().store_tiers["host"] > 1 << 20


def test_load_says_what_a_replica_would_hold(pack):
    result = packs("load", pack, pack.parent / "system")
    assert result.exit_code == 0
    assert "bytes in the tier device" in result.output


def test_a_pack_that_does_not_fit_is_refused_with_the_reason(pack, tmp_path):
    for flags, reason in [
        (["--set", "prefix_cache.block_size=32"], "block_size is 64, not 32"),
        (["--set", "model.dtype=bfloat16"], "dtype is 'float32', not 'bfloat16'"),
        (["--set", "prefix_cache.memory_bytes=1KB"], "no tier in memory has room"),
    ]:
        result = packs("load", pack, *flags)
        assert result.exit_code == 1
        assert reason in result.stderr
    assert "no manifest" in packs("load", tmp_path).stderr


def test_a_damaged_pack_is_refused(pack, tmp_path):
    import shutil

    for number, change in enumerate(("flip", "missing")):
        copy = tmp_path / str(number)
        shutil.copytree(pack, copy)
        path = sorted(copy.rglob("*.safetensors"))[3]
        if change == "flip":
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        else:
            path.unlink()
        result = packs("load", copy)
        assert result.exit_code == 1
        assert ("checksum" if change == "flip" else "should have") in result.stderr


def test_what_cannot_be_built_says_why(tmp_path):
    text = tmp_path / "text"
    text.write_text("A system prompt.")
    full = ["build", tmp_path, "--tenant", "a", "--system", text]
    assert "is not empty" in packs(*full).stderr
    assert "WARMKV_SALT is not set" in packs(*full, salt="").stderr
    assert "needs a system prompt or documents" in packs("build", tmp_path / "new", "--tenant", "a").stderr
    tenants = f"gateway.tenants=[{{name: team, key_sha256: {'a' * 64}}}]"
    unknown = packs("build", tmp_path / "new", "--tenant", "a", "--system", text, "--set", tenants)
    assert "no tenant is called 'a'; gateway.tenants has team" in unknown.stderr
    assert "No such file" in packs("build", tmp_path / "new", "--tenant", "a", "--system", tmp_path / "none").stderr

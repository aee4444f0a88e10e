"""Packs from the command line to a request that reads them through the real client."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
from typer.testing import CliRunner

from tests.unit.platform.gateway.apis.test_messages import ask, marked, plain
from warmkv.cli import app
from warmkv.config import load
from warmkv.platform import application, local
from warmkv.platform import packs as platform_packs
from warmkv.platform.tenants import chain_root, open_tenant, roots_of
from warmkv.platform.tenants_file import roots_in_force
from warmkv.prefixes.roots import Roots
from warmkv.replicas.block_store import Identity
from warmkv.replicas.block_store.disk import DiskTierError, Folder, lock_folder
from warmkv.replicas.block_store.packs import PackError
from warmkv.replicas.engines import own
from warmkv.replicas.engines.interface import Place
from warmkv.replicas.loading.load import load_model
from warmkv.replicas.loading.tokenizer import model_path

DOCUMENT = "The handbook says that every block has a name.\n" * 60
SYSTEM = "Answer from the handbook only, in one sentence. " * 20


def packs(*args: object, salt: str = "secret"):
    return CliRunner().invoke(app, ["packs", *map(str, args)], env={"WARMKV_SALT": salt})


def refused(*args: object, salt: str = "secret") -> str:
    """Return why a command refuses what it was asked for, with the exit code for that."""
    result = packs(*args, salt=salt)
    assert result.exit_code == 2, result.output
    return result.stderr


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
    size = json.loads((pack / "manifest.json").read_text())["bytes"]
    for flags, reason in [
        (["--set", "prefix_cache.block_size=32"], "its blocks have 64 tokens, not 32 (prefix_cache.block_size)"),
        (
            ["--set", "prefix_cache.memory_bytes=1KB", "--set", "prefix_cache.host.memory_bytes=2KB"],
            f"no tier in memory has room for the pack {pack}: {size:,} bytes are needed in the tier device and 1,000 "
            f"are free; raise prefix_cache.memory_bytes; or {size:,} bytes are needed in the tier host and 2,000 are "
            "free; raise prefix_cache.host.memory_bytes",
        ),
    ]:
        assert reason in refused("load", pack, *flags)
    assert "no manifest" in refused("load", tmp_path)


TEAM = f"gateway.tenants=[{{name: team, key_sha256: {'a' * 64}}}]"
CREW = TEAM.replace("team", "crew")


@pytest.mark.parametrize(
    ("salt", "settings", "reason"),
    [
        ("another", (), "it was built with another WARMKV_SALT"),
        ("", (), "WARMKV_SALT is not set here"),
        ("secret", ("model.served_name=other",), "was 'tiny' when it was built, here it is 'other'"),
        ("secret", ("model.revision=v2",), "model.revision was '' when it was built, here it is 'v2'"),
        ("secret", ("model.dtype=float32",), "model.dtype was 'auto' when it was built, here it is 'float32'"),
        ("secret", (TEAM,), "it was built for API keys, and tenants are configured here"),
    ],
    ids=["another salt", "no salt", "another name", "another revision", "another dtype", "tenants"],
)
def test_a_pack_that_no_request_could_read_is_refused_with_the_reason(pack, salt, settings, reason):
    flags = [part for setting in settings for part in ("--set", setting)]
    told = refused("load", pack, *flags, salt=salt)
    assert f"pack {pack}: no request could read it" in told
    assert reason in told


def test_packs_are_refused_where_replicas_would_not_read_them(pack, tmp_path):
    (tmp_path / "text").write_text(SYSTEM)
    build = ("build", tmp_path / "pack", "--tenant", "a", "--system", tmp_path / "text")
    off, vllm = ("--set", "prefix_cache.enabled=false"), ("--set", "engine.kind=vllm")
    for command, reason in (
        (("load", pack, *off), "prefix_cache.enabled is false: replicas load no packs"),
        (("load", pack, *vllm), "prefix_cache.packs cannot be had from an engine of kind vllm"),
        ((*build, *vllm), "prefix_cache.packs cannot be had from an engine of kind vllm"),
    ):
        assert reason in refused(*command)
    assert not (tmp_path / "pack").exists()


def test_a_pack_for_configured_tenants_is_refused_where_none_of_them_is(tmp_path):
    (tmp_path / "text").write_text(SYSTEM)
    built = packs("build", tmp_path / "pack", "--tenant", "team", "--system", tmp_path / "text", "--set", TEAM)
    assert built.exit_code == 0, built.output
    both = f"{TEAM[:-1]}, {{name: crew, key_sha256: {'b' * 64}}}]"
    assert packs("load", tmp_path / "pack", "--set", both).exit_code == 0
    assert "it was built for team, and the tenants here are crew" in refused("load", tmp_path / "pack", "--set", CREW)
    assert "it was built for team, and no tenants are configured" in refused("load", tmp_path / "pack")
    (tmp_path / "tenants.yaml").write_text(f"tenants: [{{name: team, key_sha256: {'c' * 64}}}]\n")
    assert packs("load", tmp_path / "pack", "--set", f"gateway.tenants_file={tmp_path}/tenants.yaml").exit_code == 0


def test_a_manifest_tells_no_secret(pack):
    text = (pack / "manifest.json").read_text()
    config = load(environ={})
    for key in ("alice", "bob"):
        salt = open_tenant(key, config.gateway, b"secret").salt
        for told in (key, salt.hex(), chain_root(salt, config).hex(), '"secret"'):
            assert told not in text


def copied(folder: Path) -> Path:
    """Copy the small model, as to another machine."""
    return shutil.copytree(model_path(load(environ={}).model), folder / "tiny")


def test_a_pack_is_read_where_the_model_lies_in_another_folder(serve, pack, tmp_path):
    server = serve("engine.threads=1", f"prefix_cache.packs=[{pack}]", f"model.path={copied(tmp_path)}")
    answer = ask(server, [marked(DOCUMENT), plain("What has a name?")], key="alice", system=SYSTEM)
    assert answer.usage.cache_read_input_tokens > 0
    assert answer.usage.cache_creation_input_tokens == 0


def test_a_pack_of_other_weights_of_the_same_name_is_refused(pack, tmp_path):
    file = copied(tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    safetensors.torch.save_file(tensors | {name: tensors[name] * 1.5}, file, {"format": "pt"})
    told = refused("load", pack, "--set", f"model.path={tmp_path}/tiny")
    assert "weights is" in told


def test_a_replica_refuses_a_pack_that_no_request_could_read_before_it_loads_the_model(pack):
    config = load(flags=[f"prefix_cache.packs=[{pack}]", "model.path=/nowhere/tiny"], environ={})
    place = Place("replica", 1, 1.0, roots_in_force(config, b"another"))
    with pytest.raises(PackError, match="another WARMKV_SALT"):
        own.build(config, None, place, lambda *_: None, lambda what: None)


@pytest.mark.parametrize("tenants_file", [None, "/nowhere/tenants.yaml"])
def test_replicas_hear_under_which_roots_requests_come(monkeypatch, tenants_file):
    monkeypatch.setenv("WARMKV_SALT", "secret")
    for start in ("start_directory", "start_control", "start_whatif"):
        monkeypatch.setattr(application, start, lambda *_: None)
    flags = [] if tenants_file is None else [f"gateway.tenants_file={tenants_file}"]
    config = load(flags=flags, environ={})
    bound = []

    class Deployment:
        def bind(self, *args: object) -> None:
            bound.append(args)

    monkeypatch.setattr(application.serve, "deployment", lambda *_, **__: Deployment())
    application.build(config.model_dump(mode="json", exclude_defaults=True))
    told = next(one for args in bound for one in args if isinstance(one, Roots))
    assert told == roots_of(config, b"secret", None if tenants_file is None else ())


def test_a_damaged_pack_is_refused(pack, tmp_path):
    for number, change in enumerate(("flip", "missing")):
        copy = tmp_path / str(number)
        shutil.copytree(pack, copy)
        path = sorted(copy.rglob("*.safetensors"))[3]
        if change == "flip":
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        else:
            path.unlink()
        told = refused("load", copy)
        assert ("checksum" if change == "flip" else "should have") in told


def test_show_tells_what_packs_hold(pack):
    result = packs("show", pack, pack.parent / "system", "--json", salt="")
    handbook, system = json.loads(result.stdout)
    manifest = json.loads((pack / "manifest.json").read_text())
    files = list(pack.rglob("*.safetensors"))
    lengths = [document["tokens"] for document in handbook["documents"]]
    assert [document["name"] for document in handbook["documents"]] == ["document.txt"]
    assert [document["name"] for document in system["documents"]] == ["system.txt"]
    assert (handbook["path"], handbook["tenants"], handbook["storage"]) == (str(pack), None, "model")
    assert (handbook["blocks"], handbook["tokens"], handbook["prefixes"]) == (len(files), 2 * sum(lengths), 2)
    assert 0 < handbook["bytes"] < sum(file.stat().st_size for file in files)
    assert (handbook["model"]["name"], handbook["model"]["block_size"]) == ("tiny", 64)
    assert handbook["model"]["weights"] == manifest["identity"]["weights"]
    shown = packs("show", pack).stdout
    for told in ("document.txt", "2 by API key", "float32", f"{handbook['bytes']:,}", f"{handbook['tokens']:,} tokens"):
        assert told in shown


def test_show_refuses_what_is_no_whole_pack(pack, tmp_path):
    assert "no manifest" in refused("show", tmp_path)
    manifest = json.loads((pack / "manifest.json").read_text())
    del manifest["roots"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for command in ("show", "load"):
        assert "its manifest has no roots; build it again" in refused(command, tmp_path)


@pytest.mark.parametrize("group", ["", "cluster.groups.small."])
def test_serve_refuses_a_pack_before_it_starts_ray(pack, tmp_path, monkeypatch, group):
    monkeypatch.setattr(local, "start_ray", lambda *_: pytest.fail("Ray is started"))
    cut, gone = (shutil.copytree(pack, tmp_path / name) for name in ("cut", "gone"))
    file, other = sorted(cut.rglob("*.safetensors"))[0], sorted(gone.rglob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    other.unlink()
    for folder, salt, reason in (
        (pack, "another", "it was built with another WARMKV_SALT"),
        (tmp_path / "none", "secret", "has no manifest"),
        (cut, "secret", "can be read"),
        (gone, "secret", "can be read"),
    ):
        flags = ["--port", "0", "--set", f"{group}prefix_cache.packs=[{folder}]"]
        result = CliRunner().invoke(app, ["serve", *flags], env={"WARMKV_SALT": salt})
        assert result.exit_code == 1
        assert str(folder) in result.stderr
        assert reason in result.stderr


def test_an_identity_of_another_block_size_is_told_without_the_name_twice(pack):
    identity = Identity(**json.loads((pack / "manifest.json").read_text())["identity"])
    with pytest.raises(DiskTierError, match=r"holds KV of \w+ \S+ of another kind: block_size is 64, not 32$"):
        Folder(pack, replace(identity, block_size=32), "model").check()


def parts_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    (tmp_path / "long").write_text(DOCUMENT * 20)
    (tmp_path / "text").write_text(SYSTEM)
    loads = []
    monkeypatch.setattr(platform_packs, "load_model", lambda config: loads.append(config) or load_model(config))
    command = ["build", tmp_path / "out" / "pack", "--tenant", "a", "--document"]
    told = refused(*command, tmp_path / "long", "--set", "engine.max_context=1024")
    assert "long: 1" in told
    assert "a prompt has at most 1024" in told
    assert not loads

    write, fault = Folder.write, [KeyboardInterrupt()]

    def fail(folder: Folder, *block: object) -> None:
        if len(list(folder.path.glob("??/*"))) == 2:
            raise fault[0]
        write(folder, *block)

    monkeypatch.setattr(Folder, "write", fail)
    assert packs(*command, tmp_path / "text").exit_code == 130
    assert parts_of(tmp_path / "out") == []
    fault[0] = OSError(errno.ENOSPC, "No space left on device")
    result = packs(*command, tmp_path / "text")
    assert result.exit_code == 1
    assert f"{tmp_path}/out/pack: No space left on device; the pack needs at most " in result.stderr.replace("\n", " ")
    needed = int(result.stderr.split("at most ")[1].split(" bytes")[0].replace(",", ""))
    assert parts_of(tmp_path / "out") == []

    monkeypatch.setattr(Folder, "write", write)
    (tmp_path / "out" / ".pack.part" / "00").mkdir(parents=True)  # of a build that was killed
    (tmp_path / "out" / ".pack.part" / "00" / f"{'0' * 32}.safetensors").write_bytes(b"")
    assert packs(*command, tmp_path / "text").exit_code == 0
    assert parts_of(tmp_path / "out") == ["pack"]
    assert packs("load", tmp_path / "out" / "pack").exit_code == 0
    taken = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.safetensors"))
    assert 0.9 * needed < taken <= needed


def test_an_empty_folder_becomes_the_pack_and_others_are_refused(tmp_path):
    (tmp_path / "text").write_text(SYSTEM)
    flags = ["--tenant", "a", "--system", tmp_path / "text"]
    (tmp_path / "pack").mkdir()
    assert packs("build", tmp_path / "pack", *flags).exit_code == 0
    assert packs("load", tmp_path / "pack").exit_code == 0
    assert "pack is not empty" in refused("build", tmp_path / "pack", *flags)
    assert "text is a file" in refused("build", tmp_path / "text", *flags)
    lock = lock_folder(tmp_path / ".new.part")
    assert lock is not None
    assert "new is being built by another process" in refused("build", tmp_path / "new", *flags)
    os.close(lock)
    assert packs("build", tmp_path / "new", *flags).exit_code == 0
    assert parts_of(tmp_path) == ["new", "pack", "text"]


def test_what_cannot_be_built_says_why(tmp_path):
    text = tmp_path / "text"
    text.write_text("A system prompt.")
    full = ["build", tmp_path, "--tenant", "a", "--system", text]
    assert "is not empty" in refused(*full)
    assert "WARMKV_SALT is not set" in refused(*full, salt="")
    assert "needs a system prompt or documents" in refused("build", tmp_path / "new", "--tenant", "a")
    tenants = f"gateway.tenants=[{{name: team, key_sha256: {'a' * 64}}}]"
    unknown = refused("build", tmp_path / "new", "--tenant", "a", "--system", text, "--set", tenants)
    assert "no tenant is called 'a'; gateway.tenants has team" in unknown
    for content, reason in ((None, "No such file"), (b"\xff", "text is not UTF-8 text: invalid"), (b" \n", "is empty")):
        text.unlink(missing_ok=True)
        if content is not None:
            text.write_bytes(content)
        for flag in ("--system", "--document"):
            assert reason in refused("build", tmp_path / "new", "--tenant", "a", flag, text)
    text.write_text("A short document.")
    short = refused("build", tmp_path / "new", "--tenant", "a", "--document", text)
    assert "before 64 (prefix_cache.min_tokens)" in short.replace("\n", " ")
    nameless = refused("build", tmp_path / "new", "--tenant", "", "--document", text, "--set", tenants)
    assert "no tenant is called ''; gateway.tenants has team" in nameless
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]

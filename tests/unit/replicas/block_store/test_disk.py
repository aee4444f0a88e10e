"""Folders and files: whose they are, what is wrong with them, and what a full disk does."""

from __future__ import annotations

import dataclasses
import errno
import json
import resource
import subprocess
import sys
import weakref

import pytest
import torch

from tests.unit.replicas.block_store.harness import BLOCK, CPU, IDENTITY, TOKEN, ByHand, Harness, Prompt
from warmkv.config import PrefixCacheConfig
from warmkv.policies.memory_plan import moving_limit
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.policies.tiers import Tier
from warmkv.replicas.block_store import BlockStore, disk
from warmkv.replicas.block_store.disk import BlockFileError, DiskTierError, Folder, Header
from warmkv.replicas.block_store.formats import Packed, pack

KEY = bytes(range(16))
HEADER = Header(KEY.hex(), "", "tenant", 96, 3, 3, 300.0, 1e9, 0.0, 0.0, "model")


def packed(seed=0):
    return pack(torch.randn(2, 2, 1, 3, 4, generator=torch.Generator().manual_seed(seed)), 3, "model")


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path / "blocks", IDENTITY, "model")
    folder.create()
    return folder


def test_only_its_owner_can_read_what_tenants_sent(folder):
    folder.write(packed(), HEADER)
    for path in (folder.path, *folder.path.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_block_comes_back_bit_by_bit(folder):
    folder.write(packed(), HEADER)
    found, header = folder.read(KEY)
    assert header == HEADER
    assert torch.equal(found.parts[0], packed().parts[0])
    assert list(folder.scan()) == [HEADER]
    folder.delete(KEY)
    folder.delete(KEY)
    assert list(folder.scan()) == []


@pytest.mark.parametrize("storage", ["model", "fp8", "kivi4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_and_type_can_be_written(tmp_path, storage, dtype):
    folder = Folder(tmp_path, IDENTITY, storage)
    block = pack(torch.randn(2, 2, 1, 40, 32).to(dtype), 40, storage)
    folder.write(block, dataclasses.replace(HEADER, tokens=40, storage=storage))
    found, _ = folder.read(KEY)
    assert all(torch.equal(a, b) for a, b in zip(found.parts, block.parts, strict=True))
    assert folder.file(KEY).stat().st_size <= block.nbytes + disk.FILE_BYTES


def test_every_changed_byte_is_noticed(folder):
    folder.write(packed(), HEADER)
    path = folder.file(KEY)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found, header = folder.read(KEY)
        except BlockFileError:
            continue
        assert header == HEADER  # padding, or a name that nobody reads
        assert torch.equal(found.parts[0], packed().parts[0])
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert list(folder.scan()) == [path]
        with pytest.raises(BlockFileError):
            folder.read(KEY)


def test_every_changed_bit_of_a_header_is_noticed_at_the_start(folder):
    header = dataclasses.replace(HEADER, parent="0a" * 16)
    folder.write(packed(), header)
    path = folder.file(KEY)
    whole = path.read_bytes()
    fields = json.dumps(json.dumps(dataclasses.asdict(header), sort_keys=True))[1:-1].encode()
    start = whole.index(fields)
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            found = list(folder.scan())
            assert found == [path] or (found == [header] and not start <= at < start + len(fields)), (at, bit)


def test_a_block_whose_header_was_changed_is_removed_at_the_start(folder):
    folder.write(packed(), dataclasses.replace(HEADER, parent="0a" * 16))
    path = folder.file(KEY)
    path.write_bytes(path.read_bytes().replace(b"0a" * 16, b"0q" + b"0a" * 15))
    assert disk.restore(folder, RadixTree([Tier("disk", 1 << 30)]), 0, 0.0, 0.0) == 1
    assert not path.exists()


def test_a_renamed_or_foreign_file_is_no_block(folder):
    folder.write(packed(), HEADER)
    other = folder.file(bytes(16))
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(folder.file(KEY).read_bytes())
    assert sorted(map(str, folder.scan())) == sorted(map(str, [HEADER, other]))
    with pytest.raises(BlockFileError, match="another block"):
        folder.read(bytes(16))
    other.write_bytes(b"x" * 500)
    with pytest.raises(BlockFileError, match="cannot be read"):
        folder.read(bytes(16))
    with pytest.raises(BlockFileError, match="No such file"):
        folder.read(bytes([9] * 16))


def test_a_file_of_pickled_tensors_is_not_opened(folder):
    path = folder.file(KEY)
    path.parent.mkdir()
    torch.save({"0": torch.zeros(3)}, path)
    assert list(folder.scan()) == [path]
    with pytest.raises(BlockFileError):
        folder.read(KEY)


def test_a_folder_is_taken_once_and_found_again(tmp_path):
    first, second = (disk.claim(tmp_path, IDENTITY, "model") for _ in range(2))
    assert [first.path.name, second.path.name] == ["0", "1"]
    first.release()
    assert disk.claim(tmp_path, IDENTITY, "model").path.name == "0"


def test_a_file_system_without_locks_is_told_and_leaves_one_folder(tmp_path, monkeypatch):
    """Do not take every folder for another process's."""

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks available"):
        disk.claim(tmp_path, IDENTITY, "model")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_folders_of_others_are_left_alone_and_reported(tmp_path, caplog):
    folder = disk.claim(tmp_path, IDENTITY, "model")
    folder.write(packed(), HEADER)
    folder.release()
    for unlike, storage, reason in [
        (dataclasses.replace(IDENTITY, weights="other"), "model", "weights is 'weights', not 'other'"),
        (dataclasses.replace(IDENTITY, dtype="bfloat16"), "model", "dtype is 'float32', not 'bfloat16'"),
        (dataclasses.replace(IDENTITY, block_size=9), "model", "block_size is 4, not 9"),
        (IDENTITY, "fp8", "kept as 'model', not as 'fp8'"),
    ]:
        caplog.clear()
        other = disk.claim(tmp_path, unlike, storage)
        assert other.path.name != "0"
        assert reason in caplog.text
        other.release()
    (tmp_path / "0" / "manifest.json").write_text("{")
    assert disk.claim(tmp_path, IDENTITY, "model").path.name != "0"
    assert folder.file(KEY).exists()
    for wrong in ([], {"format": 2}):
        (tmp_path / "0" / "manifest.json").write_text(json.dumps(wrong))
        with pytest.raises(DiskTierError, match="format 1"):
            folder.check()


def test_a_folder_is_free_again_when_the_process_that_held_it_is_killed(tmp_path):
    disk.claim(tmp_path, IDENTITY, "model").release()
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    command = [sys.executable, "-S", "-c", code, str(tmp_path / "0" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert disk.claim(tmp_path, IDENTITY, "model").path.name == "1"
        other.kill()
    assert disk.claim(tmp_path, IDENTITY, "model").path.name == "0"


def test_a_full_disk_loses_the_block_and_nothing_else(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of modules that are imported meanwhile, it would be cut off
    harness = Harness(tmp_path, memory_bytes=2 * BLOCK * TOKEN, host={"memory_bytes": 0})
    long = Prompt("a", [1, 2, 3, 4, 5, 6, 7, 8])
    harness.write(long, {})
    harness.write(Prompt("a", [9, 9, 9, 9]), {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))  # the system refuses to write more
    try:
        harness.run("write", 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be moved to the tier disk" in caplog.text
    harness.check()
    harness.look_up(long, [])
    assert harness.held[-1][1].match.tokens == 4  # the beginning is still on the device
    harness.check_at_rest()
    harness.write(Prompt("a", [8, 8, 8, 8]), {})
    harness.check_at_rest()
    assert harness.files()


def test_what_cannot_be_written_for_want_of_a_place_is_dropped(tmp_path):
    """More is evicted at once than may be on its way."""
    harness = Harness(tmp_path, moving_bytes=3 * BLOCK * TOKEN, host={"memory_bytes": 0})
    harness.write(Prompt("a", list(range(24))), {})
    harness.write(Prompt("a", list(range(100, 124))), {})
    assert harness.store.lost["disk"] >= 3
    harness.check_at_rest()
    assert len(harness.files()) == 3


def test_a_whole_prompt_that_is_evicted_at_once_comes_to_the_tier_below(tmp_path):
    """Lose no block with moving_bytes as a memory plan has it, however slow the thread is."""
    disk = {"memory_bytes": 1 << 20, "path": tmp_path}
    most = moving_limit(PrefixCacheConfig.model_validate({"disk": disk}), IDENTITY.shape, max_context=24)
    harness = Harness(tmp_path, moving_bytes=most.bytes, host={"memory_bytes": 0}, disk=disk)
    long = Prompt("a", list(range(24)))
    harness.write(long, {})
    harness.write(Prompt("a", list(range(100, 124))), {})
    assert harness.store.moving == 6
    assert not sum(harness.store.lost.values())
    harness.check_at_rest()
    assert len(harness.files()) == 6
    harness.look_up(long, [])
    assert harness.held[-1][1].match.tokens == 24


def test_files_that_do_not_come_in_time_are_computed(tmp_path):
    harness = Harness(tmp_path, 3.0, memory_bytes=4 * BLOCK * TOKEN, host={"memory_bytes": 0})
    old = Prompt("a", list(range(14)))
    harness.write(old, {14: "1h"})
    harness.write(Prompt("b", list(range(50, 66))), {})
    harness.run("write", 100)
    harness.look_up(old, [14])
    _, warm, _ = harness.held[-1]
    assert not harness.store.ready(warm)
    harness.now += 2.9
    assert not harness.store.ready(warm)
    harness.now += 0.2
    assert harness.store.ready(warm)
    harness.held.clear()
    harness.store.release(warm)


def test_what_is_read_is_let_go_as_it_is_copied(tmp_path):
    harness = Harness(tmp_path, memory_bytes=6 * BLOCK * TOKEN, host={"memory_bytes": 0})
    old = Prompt("a", list(range(24)))
    harness.write(old, {})
    harness.write(Prompt("b", list(range(50, 74))), {})
    harness.run("write", 100)
    harness.look_up(old, [])
    harness.run("read", 100)
    _, warm, _ = harness.held[-1]
    files = [weakref.ref(packed.parts[0]) for packed in warm.read.values()]
    held = [len(files)]
    keys, values = torch.zeros_like(old.kv)
    while harness.store.attach(warm, keys, values, 1) is None:  # a block at a time
        held.append(sum(tensor() is not None for tensor in files))
    assert held == [6, 5, 4, 3, 2, 1]
    harness.held.clear()
    harness.store.release(warm)


def test_a_restart_finds_what_was_on_disk_and_lets_expire_what_has(tmp_path):
    harness = Harness(tmp_path, memory_bytes=4 * BLOCK * TOKEN, host={"memory_bytes": 0})
    old, new = Prompt("a", list(range(14))), Prompt("b", list(range(50, 66)))
    harness.write(old, {14: "1h"})
    harness.write(new, {})
    harness.check_at_rest()
    harness.now += 29.0
    harness.restart(crash=False)
    harness.look_up(old, [14])
    assert (harness.held[-1][1].match.hit, harness.held[-1][1].match.tokens) == (14, 14)
    harness.finish(0, store=False)
    assert harness.attached["disk"] == 14
    harness.now += 250.0
    harness.restart(crash=False)
    assert (len(harness.store), harness.files()) == (0, {})


def test_what_a_killed_process_had_half_written_is_removed(tmp_path):
    harness = Harness(tmp_path)
    half = harness.store.places[-1].folder.file(KEY).with_suffix(".safetensors.part")
    half.parent.mkdir()
    half.write_bytes(b"half")
    harness.restart(crash=True)
    assert not half.exists()


def test_two_requests_for_the_same_file_read_it_once(tmp_path):
    harness = Harness(tmp_path, memory_bytes=2 * BLOCK * TOKEN, host={"memory_bytes": 0})
    first = Prompt("a", list(range(8)))
    harness.write(first, {})
    harness.write(Prompt("a", list(range(50, 58))), {})
    harness.run("write", 100)
    harness.look_up(first, [])
    harness.look_up(first, [])
    assert len(harness.lanes.jobs["read"]) == 2  # a job for each block
    harness.store.release(harness.held.pop(0)[1])  # who asked first leaves
    harness.finish(0, store=True)
    harness.check_at_rest()


def test_a_request_that_leaves_while_its_files_are_read_leaves_nothing_behind(tmp_path):
    harness = Harness(tmp_path, memory_bytes=2 * BLOCK * TOKEN, host={"memory_bytes": 0})
    first = Prompt("a", list(range(8)))
    harness.write(first, {})
    harness.write(Prompt("a", list(range(50, 58))), {})
    harness.run("write", 100)
    harness.look_up(first, [])
    harness.store.release(harness.held.pop(0)[1])
    harness.check_at_rest()


def test_a_tier_that_cannot_be_used_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    disk = {"memory_bytes": 1 << 20, "path": tmp_path / "file"}
    config = PrefixCacheConfig.model_validate({"memory_bytes": 1 << 20, "moving_bytes": 1 << 20, "disk": disk})
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        BlockStore(config, IDENTITY, CPU, lambda: 0.0, io_threads=ByHand())


def test_a_packed_block_knows_its_bytes():
    assert Packed("model", 3, packed().parts).nbytes == 2 * 2 * 3 * 4 * 4

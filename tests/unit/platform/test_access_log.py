"""The access log: rotated by whoever finds it full, bounded, and whole after whatever happened to the disk."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.simulator.conversations import record
from warmkv.config import ConfigError, load
from warmkv.platform import access_log
from warmkv.platform.access_log import BATCH, AccessLog
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.traces import TraceError
from warmkv.simulator.workload import access_log as reading
from warmkv.simulator.workload import source


def opened(path: Path, dropped: list[int] | None = None, **settings: Any) -> AccessLog:
    flags = [f"gateway.access_log={path}", *(f"gateway.{name}={value}" for name, value in settings.items())]
    gateway = load(flags=flags).gateway
    assert gateway.access_log is not None
    size = int(gateway.access_log_bytes)
    return AccessLog(gateway.access_log, size, [].append if dropped is None else dropped.append)


def line(name: str) -> RequestRecord:
    return record(0, [1] * 5, name=name)


def names(*files: Path) -> list[str]:
    return [RequestRecord.from_json(text).id for file in files for text in file.read_text().splitlines()]


def test_gateways_that_share_a_file_rotate_it_without_losing_a_line(tmp_path, monkeypatch):
    """Two writers and eleven files of at most three lines; each line is whole and there once, in the order written."""
    monkeypatch.setattr(access_log, "OLD_FILES", 30)
    path, size = tmp_path / "access.jsonl", len(line("a-00").to_json()) + 1
    logs = [opened(path, access_log_bytes=3 * size + 1) for _ in range(2)]

    def write(log: AccessLog, own: str) -> None:
        for number in range(16):
            log.write(line(f"{own}-{number:02}"))
        log.close()

    writers = [threading.Thread(target=write, args=pair) for pair in zip(logs, "ab", strict=True)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    files = [tmp_path / f"access.jsonl.{n}" for n in range(10, 0, -1)] + [path]
    assert {file.name for file in tmp_path.iterdir()} == {*(f.name for f in files), ".access.jsonl.lock"}
    assert max(file.stat().st_size for file in files) <= 3 * size
    found = names(*files)
    for own in "ab":
        assert [name for name in found if name.startswith(own)] == [f"{own}-{n:02}" for n in range(16)]


def test_only_so_many_files_are_kept(tmp_path):
    path = tmp_path / "access.jsonl"
    log = opened(path, access_log_bytes=1)
    for number in range(9):
        log.write(line(str(number)))
    log.close()
    old = [path.with_name(f"access.jsonl.{number + 1}") for number in range(access_log.OLD_FILES + 1)]
    assert names(path, *old[:-1]) == ["8", "7", "6", "5", "4"]
    assert not old[-1].exists()


def test_nothing_is_rotated_where_the_limit_is_0(tmp_path):
    log = opened(tmp_path / "access.jsonl", access_log_bytes=0)
    for number in range(6):
        log.write(line(str(number)))
    log.close()
    assert len(names(tmp_path / "access.jsonl")) == 6


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log, "QUEUE", 5)
    path, dropped = tmp_path / "access.jsonl", []
    log = opened(path, dropped)
    with (tmp_path / ".access.jsonl.lock").open("r+") as held:  # as a gateway does whose disk hangs
        fcntl.flock(held, fcntl.LOCK_EX)
        for number in range(BATCH + 20):
            log.write(line(str(number)))
        assert 20 - 5 <= sum(dropped) <= BATCH + 20 - 5
    log.close()
    assert len(names(path)) + sum(dropped) == BATCH + 20


def test_a_disk_that_fails_is_counted_and_named(caplog):
    dropped: list[int] = []
    log = opened(Path("/dev/full"), dropped)
    log.write(line("a"))
    log.close()
    assert dropped == [1]
    assert "No space left on device" in caplog.text
    assert "/dev/full" in caplog.text


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    path = tmp_path / "access.jsonl"
    path.write_text(line("before").to_json() + "\n" + line("cut").to_json()[:40])
    log = opened(path)
    log.write(line("after"))
    log.close()
    read = reading.read(path)
    assert [request.id for request in read.requests] == ["before", "after"]
    assert read.broken == 1


def test_a_file_that_a_tool_moved_away_is_made_anew(tmp_path):
    path = tmp_path / "access.jsonl"
    log = opened(path)
    path.rename(tmp_path / "moved")
    log.write(line("a"))
    log.close()
    assert names(path) == ["a"]


def test_rotated_logs_are_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log, "OLD_FILES", 20)
    path = tmp_path / "logs" / "access.jsonl"
    log = opened(path, access_log_bytes=1)
    for number in range(12):
        log.write(record(number, [number] * 5, name=str(number)))
    log.close()
    config = load()
    trace = source.read(source.Source(path.parent), config)
    assert [request.id for request in trace.requests.records] == [str(number) for number in range(12)]
    assert trace.format == "warmkv"
    (tmp_path / "whole").write_text("".join((path.parent / f.name).read_text() for f in ordered(path)))
    assert source.file_digest(path.parent) == source.file_digest(tmp_path / "whole") == trace.sha256


def ordered(path: Path) -> list[Path]:
    return [*(path.with_name(f"{path.name}.{n}") for n in range(11, 0, -1)), path]


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match="has no file"):
        source.read(source.Source(tmp_path), load())


def test_a_limit_that_cannot_be_kept_is_refused_by_name():
    with pytest.raises(ConfigError, match="access_log_bytes"):
        load(flags=["gateway.access_log_bytes=-1"])

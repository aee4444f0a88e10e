"""The access log: one line per request, written by a thread so that no request waits for a disk; the audit log as well.

Gateways of one machine may share the file. Each batch of lines is appended under a lock (`.NAME.lock` beside it), and
whoever finds the file full renames it to NAME.1, the one before to NAME.2 and so on; the others see the new file.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from warmkv.logs import LineLimit

log = logging.getLogger(__name__)

QUEUE = 10_000  # lines that may wait for the disk; more are dropped, and counted
COMPLAINTS_PER_MINUTE = 60  # lines about faults of the disk
BATCH = 256  # most lines that are written under one lock
OLD_FILES = 4  # that are kept besides the one that is written


class Record(Protocol):
    """What is a line of the log: a `RequestRecord`, or an operator's `Action`."""

    def to_json(self) -> str: ...


class AccessLog:
    """Appends records to a file, which is rotated when it has `file_bytes`; 0: never.

    `dropped` is told of lines that are lost, with their number: by the caller of `write` where the queue is full, by
    the writing thread where the disk fails. Raises OSError where the file cannot be opened.
    """

    def __init__(self, path: Path, file_bytes: int, dropped: Callable[[int], None] = lambda lines: None) -> None:
        self._path, self._file_bytes, self._dropped = path, file_bytes, dropped
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open(self._path)
        self._lock: int | None = None
        if stat.S_ISREG(os.fstat(self._file).st_mode):  # a pipe or a terminal is neither locked nor rotated
            lock = self._path.with_name(f".{self._path.name}.lock")
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._records: queue.Queue[Record | None] = queue.Queue(QUEUE)
        self._complaints = LineLimit(COMPLAINTS_PER_MINUTE, time.monotonic)
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a record; where the queue is full it is dropped and counted. Never waits."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._dropped(1)

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._records.put(None)
        self._thread.join()
        os.close(self._file)
        if self._lock is not None:
            os.close(self._lock)

    def _run(self) -> None:
        going_on = True
        while going_on:
            batch = [self._records.get()]
            while len(batch) < BATCH and not self._records.empty():
                batch.append(self._records.get())
            records = [record for record in batch if record is not None]
            going_on = len(records) == len(batch)
            self._write(records)

    def _write(self, records: list[Record]) -> None:
        """Append a batch; what the disk does not take is counted and reported, and fails no request.

        A record that cannot be made into a line costs no other one.
        """
        written = 0
        try:
            lines = [line for record in records if (line := self._line(record))]
            with self._locked():
                for line in lines:
                    self._append(line)
                    written += 1
        except Exception as error:
            self._complain(error)
        if written < len(records):
            self._dropped(len(records) - written)

    def _line(self, record: Record) -> bytes:
        """Return a record as a line, or nothing where it cannot be made into one."""
        try:
            return record.to_json().encode() + b"\n"
        except Exception as error:
            self._complain(error)
            return b""

    def _complain(self, error: Exception) -> None:
        if (suppressed := self._complaints.take()) is not None:
            log.error("log %s: %s suppressed=%d", self._path, error, suppressed)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, with the file open that has the name now and ends with a whole line."""
        if self._lock is None:
            yield
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            if not _is_at(self._file, self._path):  # another gateway has rotated it, or a tool moved it away
                self._reopen()
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":  # a full disk, or a crash, cut a line off
                self._put(b"\n")
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _append(self, line: bytes) -> None:
        if self._lock is not None and self._file_bytes:
            size = os.fstat(self._file).st_size
            if size and size + len(line) > self._file_bytes:
                self._rotate()
        self._put(line)

    def _put(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._file, line) :]

    def _rotate(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n + 1}") for n in range(OLD_FILES))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            if newer.exists():
                newer.replace(older)
        self._reopen()

    def _reopen(self) -> None:
        opened = _open(self._path)
        os.close(self._file)
        self._file = opened


def _open(path: Path) -> int:
    readable = not path.exists() or path.is_file()
    mode = os.O_RDWR if readable else os.O_WRONLY
    return os.open(path, mode | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False

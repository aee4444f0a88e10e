"""Files of a trace: which a path names, and how one is opened, hashed on the way."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import re
import shutil
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from warmkv.simulator.traces.columns import TraceError

STANDARD_INPUT = Path("-")
BUFFER = 1 << 17  # bytes read at a time
AHEAD = 4  # pieces that wait to be hashed
AIPERF_REQUESTS = "profile_export.jsonl"
SESSIONS_INDEX = "sessions-index.json"  # of Claude Code
GZIP = b"\x1f\x8b"
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell's `>` writes it


def files_of(path: Path) -> list[Path]:
    """List the files of a trace: `path` itself, or those of a folder, of rotated logs the oldest first.

    A folder has its own files and the `.jsonl` files of folders below, as Claude Code keeps sessions and their
    subagents; hidden ones are left out. Of the artifacts of aiperf it is their requests. Raises TraceError.
    """
    if path == STANDARD_INPUT or not path.is_dir():
        return [path]
    if (requests := path / AIPERF_REQUESTS).is_file():
        return [requests]
    found = [file for file in path.iterdir() if file.name != SESSIONS_INDEX]
    found += path.glob("*/**/*.jsonl")
    found = [file for file in found if file.is_file() and not _is_hidden(file.relative_to(path))]
    if not found:
        raise TraceError(f"cannot read {path}: the folder has no file")
    return sorted(found, key=lambda file: (*_rotation(file), str(file)))


def are_parts_of_one(first: Path, second: Path) -> bool:
    """Return True for files of one name and folder that rotation has numbered, as access.jsonl and access.jsonl.1."""
    return (first.parent, _rotation(first)[0]) == (second.parent, _rotation(second)[0])


def is_stored(path: Path) -> bool:
    """Return True for a file or a folder, which can be read again; a pipe cannot."""
    return path != STANDARD_INPUT and (path.is_file() or path.is_dir())


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _rotation(file: Path) -> tuple[str, int]:
    """Return name and number, as of access.jsonl.2, so that higher numbers come first and what is written last."""
    name, number = re.fullmatch(r"(.*?)(?:\.(\d+))?(?:\.gz)?", file.name, re.DOTALL).groups()  # type: ignore[union-attr]
    return name, -int(number or 0)


@contextmanager
def text_of(path: Path, digest: Digest | None = None) -> Iterator[io.TextIOWrapper]:
    """Open a file as text, unpacked if it is compressed with gzip; all of its bytes go into `digest`.

    Text is UTF-8, or UTF-16 with a byte order mark. `-` is standard input. Raises TraceError, also for what fails
    while reading.
    """
    try:
        with ExitStack() as stack:
            raw = _opened(path, stack)
            buffered = io.BufferedReader(raw if digest is None else Hashed(raw, digest), BUFFER)
            unpacked: Any = gzip.GzipFile(fileobj=buffered) if buffered.peek(2)[:2] == GZIP else buffered
            if unpacked.peek(2)[:2] in UTF16:
                unpacked = _as_utf8(unpacked, stack)
            with io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="replace") as file:
                yield file
                if digest is not None:  # a format may end before its file
                    while buffered.read(BUFFER):
                        pass
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None


def _opened(path: Path, stack: ExitStack) -> Any:
    """Open a file that can be read from its beginning again; a pipe is copied to a temporary file."""
    raw: Any = sys.stdin.buffer if path == STANDARD_INPUT else stack.enter_context(path.open("rb", buffering=0))
    if raw.seekable():
        return raw
    spool = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    shutil.copyfileobj(raw, spool, BUFFER)
    spool.seek(0)
    return spool


def _as_utf8(file: Any, stack: ExitStack) -> Any:
    """Write UTF-16 as UTF-8 to a temporary file, whose lines are found by their bytes."""
    spool = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    for text in codecs.iterdecode(iter(partial(file.read, BUFFER), b""), "utf-16", "replace"):
        spool.write(text.encode("utf-8", "replace"))
    spool.seek(0)
    return spool


class Digest:
    """Compute SHA-256 in a thread of its own, beside whoever parses the same bytes."""

    def __init__(self) -> None:
        self._sha256, self._thread = hashlib.sha256(), ThreadPoolExecutor(1, "sha256")
        self._pieces: deque[Future[None]] = deque()  # that wait, a few

    def update(self, data: memoryview) -> None:
        """Add bytes, which may change afterwards."""
        self._pieces.append(self._thread.submit(self._sha256.update, bytes(data)))
        if len(self._pieces) > AHEAD:
            self._pieces.popleft().result()

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        return self._thread.submit(self._sha256.hexdigest).result()


class Hashed(io.RawIOBase):
    """Read a file and hash its bytes, each once, though it may be read from its beginning again."""

    def __init__(self, raw: io.RawIOBase, digest: Digest) -> None:
        self._raw, self._digest, self._at, self._hashed = raw, digest, 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = self._raw.seek(offset, whence)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        new = max(0, self._hashed - self._at)
        if new < count:
            self._digest.update(memoryview(buffer)[new:count])
            self._hashed = self._at + count
        self._at += count
        return count

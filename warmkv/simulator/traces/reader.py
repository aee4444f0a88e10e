"""Opening a trace of any format: recognised by its content, read at once or in parts."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.traces.agentic import AGENTIC
from warmkv.simulator.traces.aiperf import AIPERF
from warmkv.simulator.traces.azure import AZURE
from warmkv.simulator.traces.bailian import BAILIAN
from warmkv.simulator.traces.burstgpt import BURSTGPT
from warmkv.simulator.traces.calls import Call, records
from warmkv.simulator.traces.claude_code import CLAUDE_CODE
from warmkv.simulator.traces.columns import Builder, Row, RowError, Trace, TraceError, join
from warmkv.simulator.traces.langfuse import LANGFUSE
from warmkv.simulator.traces.litellm import LITELLM
from warmkv.simulator.traces.mooncake import MOONCAKE
from warmkv.simulator.traces.opentelemetry import OPENTELEMETRY
from warmkv.simulator.traces.rows import Format, Reading, TooLongError
from warmkv.simulator.traces.sharegpt import SHAREGPT
from warmkv.simulator.traces.vllm_bench import VLLM_BENCH
from warmkv.simulator.traces.warmkv import WARMKV, LogLines, row_of, rows_of
from warmkv.simulator.traces.warmkv import read as read_log

PUBLIC = (MOONCAKE, BAILIAN, AGENTIC, SHAREGPT, AZURE, BURSTGPT)
LOGS = (CLAUDE_CODE, LITELLM, LANGFUSE, OPENTELEMETRY, VLLM_BENCH, AIPERF)
FORMATS = {one.name: one for one in (WARMKV, *PUBLIC, *LOGS)}
KEPT_FAULTS = 20  # faults kept word for word; all are counted
HEAD = 1 << 16  # characters of the beginning in which a format is recognised
BUFFER = 1 << 17  # bytes read at a time
AHEAD = 4  # pieces that wait to be hashed
PART = 100_000  # requests of a part
AIPERF_REQUESTS = "profile_export.jsonl"
SESSIONS_INDEX = "sessions-index.json"  # of Claude Code
GZIP = b"\x1f\x8b"

Progress = Callable[[int], None]  # told how many requests were read


class Rows:
    """The requests of a trace's files, in their order; each file is opened once, to be recognised, hashed and parsed.

    `format` is known from the beginning, the rest when all is read. `fallback` is the format of a file that is not
    recognised. Raises TraceError if a file cannot be read, or is of no known format and none is named, and at the first
    broken row if `strict`.
    """

    def __init__(
        self,
        path: Path,
        format: str | None = None,
        *,
        reading: Reading = Reading(),
        strict: bool = False,
        fallback: str | None = None,
    ) -> None:
        self._reading, self._strict, self._fallback = reading, strict, fallback
        self.broken = self.skipped = 0
        self.faults: list[str] = []  # the first of the broken rows
        self._digest = Digest()
        self._file, self._line = path, 0
        self._rows = self._read(files_of(path), format)
        next(self._rows)  # until the format is known

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the files as they are, one behind the other."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Row | RequestRecord | LogLines]:
        return self._rows

    def one_by_one(self) -> Iterator[Row]:
        """Yield what the columns of a trace hold of each request."""
        for item in self._rows:
            if isinstance(item, LogLines):
                for self._line, row in zip(item.lines, rows_of(item.chunk), strict=True):
                    if row is not None:
                        yield row
            elif isinstance(item, RequestRecord):
                yield row_of(item)
            else:
                yield item

    def _read(self, files: Sequence[Path], name: str | None) -> Iterator[Any]:
        calls: list[Call] = []
        for number, self._file in enumerate(files):
            with text_of(self._file, self._digest) as text:
                if not number:
                    self.format = format_of(text, self._file, name, self._fallback)
                    yield
                parser = self.format.parser
                try:
                    if parser is None:
                        for part in read_log(text, self._refuse):
                            self.skipped += part.skipped
                            yield part
                        continue
                    parse = parser(replace(self._reading, file=self._file))
                    for line, item in self.format.items(text):
                        self._line = line
                        try:
                            rows = list(parse(item))
                        except RowError as error:
                            self.leave_out(str(error))
                            continue
                        for row in rows:
                            if row is None:
                                self.skipped += 1
                            elif isinstance(row, Call):
                                calls.append(row)
                            else:
                                yield row
                except TooLongError as error:
                    raise TraceError(f"{self._file}:{error.line}: {error}") from None
        yield from records(calls, self._reading)  # conversations lie in several files

    def _refuse(self, line: int, reason: str) -> None:
        self._line = line
        self.leave_out(reason)

    def leave_out(self, reason: str) -> None:
        """Count the row that was read last as broken. Raises TraceError if `strict`."""
        fault = f"{self._file}:{self._line}: {reason}"
        if self._strict:
            raise TraceError(fault)
        self.broken += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(fault)


def read(
    path: Path,
    format: str | None = None,
    *,
    reading: Reading = Reading(),
    strict: bool = False,
    progress: Progress = lambda requests: None,
) -> Trace:
    """Read a whole trace as columns, in the order of arrival. Raises TraceError as `Rows` does."""
    return columns(Rows(path, format, reading=reading, strict=strict), progress)


def columns(rows: Rows, progress: Progress = lambda requests: None) -> Trace:
    return join(list(parts(rows, progress=progress))).by_arrival()


def stream(
    path: Path,
    format: str | None = None,
    *,
    reading: Reading = Reading(),
    strict: bool = False,
    size: int = PART,
) -> Iterator[Trace]:
    """Read a trace in parts of about `size` requests, in the order of the file. Raises TraceError as `Rows` does.

    Numbers of sessions and tenants agree; the last part has the account of what was left out.
    """
    return parts(Rows(path, format, reading=reading, strict=strict), size)


def parts(rows: Rows, size: int = PART, progress: Progress = lambda requests: None) -> Iterator[Trace]:
    """Put rows into columns, `size` of them at a time."""
    builder, before, count = Builder(rows.format.name), 0, 0
    notes = (rows.format.note,) if rows.format.note else ()
    for row in rows.one_by_one():
        try:
            builder.add(row)
        except RowError as error:
            rows.leave_out(str(error))
            continue
        count += 1
        if count == size:
            before, count = before + count, 0
            progress(before)
            yield builder.build(notes=notes)
    if count or rows.broken or rows.skipped or not before:
        progress(before + count)
        yield builder.build(broken=rows.broken, skipped=rows.skipped, faults=tuple(rows.faults), notes=notes)


def files_of(path: Path) -> list[Path]:
    """List the files of a trace: `path` itself, or all of a folder, of rotated logs the oldest first.

    Of a folder without files all `.jsonl` files below it, as Claude Code keeps its sessions; subagents have folders
    beside their session. Of the artifacts of aiperf its requests. Raises TraceError.
    """
    if not path.is_dir():
        return [path]
    if (requests := path / AIPERF_REQUESTS).is_file():
        return [requests]
    found = [file for file in path.iterdir() if file.is_file() and file.name != SESSIONS_INDEX]
    found += path.glob("*/subagents/*.jsonl") if found else path.rglob("*.jsonl")
    found = [file for file in found if not file.name.startswith(".")]
    if not found:
        raise TraceError(f"cannot read {path}: the folder has no file")
    return sorted(found, key=_rotation)


def _rotation(file: Path) -> tuple[str, int]:
    """Name and number, as of access.jsonl.2, so that higher numbers come first and the file that is written last."""
    name, number = re.fullmatch(r"(.*?)(?:\.(\d+))?(?:\.gz)?", file.name, re.DOTALL).groups()  # type: ignore[union-attr]
    return name, -int(number or 0)


@contextmanager
def text_of(path: Path, digest: Digest | None = None) -> Iterator[io.TextIOWrapper]:
    """Open a file as text, unpacked if it is compressed with gzip; all of its bytes go into `digest`.

    Raises TraceError, also for what fails while reading.
    """
    try:
        with path.open("rb", buffering=0) as raw:
            source = raw if digest is None else Hashed(raw, digest)
            buffered = io.BufferedReader(source, BUFFER)
            packed = buffered.peek(2)[:2] == GZIP
            unpacked = gzip.GzipFile(fileobj=buffered) if packed else buffered
            with io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="replace") as file:
                yield file
                if digest is not None:  # a format may end before its file
                    while buffered.read(BUFFER):
                        pass
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None


class Digest:
    """SHA-256 that a thread of its own computes, beside whoever parses the same bytes."""

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
    """A file whose bytes are hashed as they are read, each once, though it may be read from its beginning again."""

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


def format_of(file: IO[str], path: Path, name: str | None, fallback: str | None = None) -> Format:
    """Return the format of that name, or that the beginning of a file tells. Raises TraceError."""
    if name is not None:
        if name not in FORMATS:
            raise TraceError(f"{name!r} is no trace format; there are {', '.join(FORMATS)}")
        return FORMATS[name]
    head = file.read(HEAD)
    file.seek(0)
    for text in (*head.splitlines(), head):  # at last all of it: JSON may be written over many lines
        for format in FORMATS.values():
            if format.recognises(text):
                return format
    if fallback is not None:
        return FORMATS[fallback]
    what = "is of no format that is recognised" if head.strip() else "is empty"
    raise TraceError(f"{path} {what}; name its format: {', '.join(FORMATS)}")

"""Opening a trace of any format: recognised by its content, read at once or in parts."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from warmkv.simulator.traces.agentic import AGENTIC
from warmkv.simulator.traces.azure import AZURE
from warmkv.simulator.traces.bailian import BAILIAN
from warmkv.simulator.traces.burstgpt import BURSTGPT
from warmkv.simulator.traces.columns import Builder, RowError, Trace, TraceError, join
from warmkv.simulator.traces.mooncake import MOONCAKE
from warmkv.simulator.traces.rows import Format, Reading
from warmkv.simulator.traces.sharegpt import SHAREGPT
from warmkv.simulator.traces.warmkv import WARMKV

FORMATS = {one.name: one for one in (WARMKV, MOONCAKE, BAILIAN, AGENTIC, SHAREGPT, AZURE, BURSTGPT)}
KEPT_FAULTS = 20  # faults kept word for word; all are counted
HEAD = 1 << 16  # characters of the beginning in which a format is recognised
GZIP = b"\x1f\x8b"

Progress = Callable[[int], None]  # told how many requests were read


def read(
    path: Path,
    format: str | None = None,
    *,
    reading: Reading = Reading(),
    strict: bool = False,
    progress: Progress = lambda requests: None,
) -> Trace:
    """A whole trace in the order of arrival. Raises TraceError as `stream` does."""
    parts = list(stream(path, format, reading=reading, strict=strict, progress=progress))
    return join(parts).by_arrival()


def stream(
    path: Path,
    format: str | None = None,
    *,
    reading: Reading = Reading(),
    strict: bool = False,
    size: int = 100_000,
    progress: Progress = lambda requests: None,
) -> Iterator[Trace]:
    """A trace in parts of about `size` requests, in the order of the file; numbers of sessions and tenants agree.

    Files compressed with gzip are read as they are, and of a folder all files, as `files_of` orders them: one trace.
    Raises TraceError if a file cannot be read, or is of no known format and none is named, and at the first broken row
    if `strict`.
    """
    files = files_of(path)
    chosen = format_of(files[0], format)
    builder = Builder(chosen.name)
    notes = (chosen.note,) if chosen.note else ()
    broken = skipped = before = 0
    kept = 0  # faults told in earlier parts
    faults: list[str] = []
    for file in files:
        parse = chosen.parser(reading)
        for number, text in _items(file, chosen):
            try:
                rows = list(parse(text))
            except RowError as error:
                rows, reasons = [], [str(error)]
            else:
                reasons = []
            for row in rows:
                if row is None:
                    skipped += 1
                    continue
                try:
                    builder.add(row)
                except RowError as error:
                    reasons.append(str(error))
            for reason in reasons:
                fault = f"{file}:{number}: {reason}"
                if strict:
                    raise TraceError(fault)
                broken += 1
                if kept + len(faults) < KEPT_FAULTS:
                    faults.append(fault)
            if len(builder) >= size:
                before += len(builder)
                progress(before)
                yield builder.build(broken=broken, skipped=skipped, faults=tuple(faults), notes=notes)
                broken, skipped, kept, faults = 0, 0, kept + len(faults), []
    if len(builder) or broken or skipped or not before:
        progress(before + len(builder))
        yield builder.build(broken=broken, skipped=skipped, faults=tuple(faults), notes=notes)


def files_of(path: Path) -> list[Path]:
    """The files of a trace: `path` itself, or all of a folder, of rotated logs the oldest first. Raises TraceError."""
    if not path.is_dir():
        return [path]
    found = [file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")]
    if not found:
        raise TraceError(f"cannot read {path}: the folder has no file")
    return sorted(found, key=_rotation)


def _rotation(file: Path) -> tuple[str, int]:
    """Name and number, as of access.jsonl.2, so that higher numbers come first and the file that is written last."""
    name, number = re.fullmatch(r"(.*?)(?:\.(\d+))?(?:\.gz)?", file.name, re.DOTALL).groups()  # type: ignore[union-attr]
    return name, -int(number or 0)


def _items(path: Path, format: Format) -> Iterator[tuple[int, str]]:
    with text_of(path) as file:
        yield from format.items(file)


@contextmanager
def text_of(path: Path) -> Iterator[IO[str]]:
    """A file as text, unpacked if it is compressed with gzip. Raises TraceError, also for what fails while reading."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP
            raw.seek(0)
            unpacked = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="replace") as file:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None


def format_of(path: Path, name: str | None) -> Format:
    """The format of that name, or that the beginning of a file tells. Raises TraceError."""
    if name is not None:
        if name not in FORMATS:
            raise TraceError(f"{name!r} is no trace format; there are {', '.join(FORMATS)}")
        return FORMATS[name]
    with text_of(path) as file:
        head = file.read(HEAD)
    for line in head.splitlines():
        for format in FORMATS.values():
            if format.recognises(line):
                return format
    what = "is of no format that is recognised" if head.strip() else "is empty"
    raise TraceError(f"{path} {what}; name its format: {', '.join(FORMATS)}")

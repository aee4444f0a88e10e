"""Reading a trace of any format: each file is recognised by its content, and read at once or in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.traces.agentic import AGENTIC
from warmkv.simulator.traces.aiperf import AIPERF
from warmkv.simulator.traces.azure import AZURE
from warmkv.simulator.traces.bailian import BAILIAN
from warmkv.simulator.traces.burstgpt import BURSTGPT
from warmkv.simulator.traces.calls import Call, distinct, records
from warmkv.simulator.traces.claude_code import CLAUDE_CODE
from warmkv.simulator.traces.columns import Builder, Row, RowError, Trace, TraceError, join
from warmkv.simulator.traces.files import STANDARD_INPUT, Digest, are_parts_of_one, files_of, text_of
from warmkv.simulator.traces.langfuse import LANGFUSE
from warmkv.simulator.traces.litellm import LITELLM
from warmkv.simulator.traces.mooncake import MOONCAKE
from warmkv.simulator.traces.opentelemetry import OPENTELEMETRY
from warmkv.simulator.traces.rows import Format, Learned, Reading, TooLongError
from warmkv.simulator.traces.sharegpt import SHAREGPT
from warmkv.simulator.traces.vllm_bench import VLLM_BENCH
from warmkv.simulator.traces.warmkv import WARMKV, LogLines, row_of, rows_of
from warmkv.simulator.traces.warmkv import read as read_log

PUBLIC = (MOONCAKE, BAILIAN, AGENTIC, SHAREGPT, AZURE, BURSTGPT)
LOGS = (CLAUDE_CODE, LITELLM, LANGFUSE, OPENTELEMETRY, VLLM_BENCH, AIPERF)
FORMATS = {one.name: one for one in (WARMKV, *PUBLIC, *LOGS)}
KEPT_FAULTS = 20  # faults kept word for word; all are counted
HEAD = 1 << 16  # characters of the beginning in which a format is recognised
PART = 100_000  # requests of a part

Progress = Callable[[int], None]  # told how many requests were read


class Rows:
    """The requests of a trace's files, in their order; each file is opened once, to be recognised, hashed and parsed.

    Files of a folder that are of no known format are left out; `unrecognised` names them. Formats with records may be
    mixed, since they have one clock and usage of their own. `format` is that of the first file and known from the
    beginning, the rest when all is read. Raises TraceError if a file cannot be read, if none is of a known format and
    none is named, if other formats are mixed, or files whose times and numbers are their own, and at the first broken
    row or unknown file if `strict`.
    """

    def __init__(
        self, path: Path, format: str | None = None, *, reading: Reading = Reading(), strict: bool = False
    ) -> None:
        if format is not None and format not in FORMATS:
            raise TraceError(f"{format!r} is no trace format; there are {', '.join(FORMATS)}")
        self._reading, self._strict = replace(reading, learned=Learned()), strict
        self.broken = self.skipped = 0
        self.faults: list[str] = []  # the first of the broken rows
        self.unrecognised: list[str] = []
        self._formats: dict[Format, Path] = {}  # and the first file of each
        self._digest = Digest()
        self._file, self._line = path, 0
        self._rows = self._read(path, FORMATS[format] if format else None)
        next(self._rows)  # until the format is known

    @property
    def format(self) -> Format:
        """Return the format of the first file."""
        return next(iter(self._formats))

    @property
    def format_name(self) -> str:
        """Return the names of all formats."""
        return "+".join(format.name for format in self._formats)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the readers assume, each once, and how many prompts the log has only in part."""
        found = dict.fromkeys(format.note for format in self._formats if format.note)
        if cut := self._reading.learned.cut:
            found[f"of {cut:,} prompts the log has a part alone; their prefixes are derived"] = None
        return tuple(found)

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

    def _read(self, path: Path, named: Format | None) -> Iterator[Any]:
        calls: dict[str, list[Call]] = {}  # of each format
        found, wrong = False, ""
        for self._file in files_of(path):
            with text_of(self._file, self._digest) as text:
                format = named or format_of(text)
                if format is None:
                    self._leave_out_file(text, alone=self._file == path)
                    continue
                first = not self._formats
                self._add_format(format)
                if first:
                    yield
                for item in self._items(text, format):
                    found = True
                    if isinstance(item, Call):
                        calls.setdefault(format.name, []).append(item)
                    else:
                        yield item
                if named and not found:
                    wrong = wrong or self._wrong_name(text, named)
        if not self._formats:
            if not self.unrecognised:
                raise TraceError(f"{path} is empty")
            raise TraceError(
                f"{self.unrecognised[0]} is of no format that is recognised; name its format: {', '.join(FORMATS)}"
            )
        if wrong and not found:
            raise TraceError(wrong)
        merged = [call for of_format in calls.values() for call in distinct(of_format)]
        self._file, self._line = path, 0
        yield from records(merged, self._reading)  # conversations lie in several files

    def _items(self, text: Any, format: Format) -> Iterator[Row | RequestRecord | LogLines | Call]:
        """Yield what a file holds, and account for the rest. Raises TraceError."""
        try:
            if format.parser is None:
                for part in read_log(text, self._refuse):
                    self.skipped += part.skipped
                    yield part
                return
            file = None if self._file == STANDARD_INPUT else self._file
            parse = format.parser(replace(self._reading, file=file))
            for self._line, item in format.items(text):
                try:
                    rows = list(parse(item))
                except RowError as error:
                    self.leave_out(str(error))
                    continue
                for row in rows:
                    if row is None:
                        self.skipped += 1
                    elif isinstance(row, RowError):
                        self.leave_out(str(row))
                    else:
                        yield row
        except TooLongError as error:
            raise TraceError(f"{self._file}:{error.line}: {error}") from None

    def _add_format(self, format: Format) -> None:
        """Note the format of the file that is read. Raises TraceError if it does not go with the others."""
        other = self._formats.setdefault(format, self._file)
        if format.is_file_local and not are_parts_of_one(other, self._file):
            raise TraceError(
                f"{other} and {self._file} are of the format {format.name}, in which times and numbers are those of a "
                "file; give each a folder of its own"
            )
        if len(self._formats) > 1 and not all(one.records for one in self._formats):
            (first, before), *_ = self._formats.items()
            raise TraceError(
                f"{before} is of the format {first.name}, {self._file} of {format.name}, and these two are not read "
                "together; give each a folder of its own"
            )

    def _leave_out_file(self, text: IO[str], *, alone: bool) -> None:
        """Note a file of no known format; one that is empty has nothing to lose. Raises TraceError if `strict`."""
        if not text.read(HEAD).strip():
            return
        self.unrecognised.append(str(self._file))
        if self._strict and not alone:
            raise TraceError(f"{self._file} is of no format that is recognised")

    def _wrong_name(self, text: IO[str], named: Format) -> str:
        """Return what to say of a file without requests of the format that was named, if it is of another one."""
        text.seek(0)
        format = format_of(text)
        if format is None or format is named:
            return ""
        return f"{self._file} has no request of the format {named.name}; it is of the format {format.name}"

    def _refuse(self, line: int, reason: str) -> None:
        self._line = line
        self.leave_out(reason)

    def leave_out(self, reason: str) -> None:
        """Count the row that was read last as broken. Raises TraceError if `strict`."""
        fault = f"{self._file}:{self._line}: {reason}" if self._line else f"{self._file}: {reason}"
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
            builder.format = rows.format_name
            yield builder.build(notes=rows.notes)
    if count or rows.broken or rows.skipped or rows.unrecognised or not before:
        progress(before + count)
        builder.format = rows.format_name
        yield builder.build(
            broken=rows.broken,
            skipped=rows.skipped,
            faults=tuple(rows.faults),
            unrecognised=tuple(rows.unrecognised),
            notes=rows.notes,
        )


def format_of(file: IO[str]) -> Format | None:
    """Return the format that the beginning of a file tells, which is then read again; None if it is not known."""
    head = file.read(HEAD)
    file.seek(0)
    for text in (*head.splitlines(), head):  # at last all of it: JSON may be written over many lines
        for format in FORMATS.values():
            if format.recognises(text):
                return format
    return None

"""What the readers share: fields of a row, and the shape of a format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.traces.columns import Row, RowError

if TYPE_CHECKING:
    from warmkv.simulator.traces.calls import Call

# From an item of a file to its requests; None for one that is left out on purpose. Raises RowError.
Parse = Callable[[str], "Iterable[Row | RequestRecord | Call | None]"]
Items = Iterator[tuple[int, str]]  # line number, text
READ = 1 << 20  # characters read at a time
LONGEST = 1 << 28  # characters of a row, as it is held in memory
_SEPARATORS = re.compile(r"[ \t\r\n,]*")
_CELL = re.compile(r'(?:\s*"([^"]*(?:""[^"]*)*)"\s*|([^,"]*))(,|$)')


class TooLongError(RowError):
    """A row that is too long to be held in memory; nothing after it can be read."""

    def __init__(self, line: int) -> None:
        super().__init__(f"a row has more than {LONGEST:,} characters")
        self.line = line


@dataclass(frozen=True, slots=True)
class Reading:
    """What a caller may say about a file. None where the format knows."""

    block_size: int | None = None  # tokens in a block, of formats that do not tell
    characters_per_token: float | None = None  # of formats that have texts
    file: Path | None = None  # that is read now


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    recognises: Callable[[str], bool]  # a line of the file
    parser: Callable[[Reading], Parse] | None  # of an item; None where lines are read many at a time, as columns
    items: Callable[[IO[str]], Items]
    note: str = ""  # what the reader assumes
    records: bool = False  # whether its requests are records, with breakpoints, tenants and usage of their own


def lines(file: IO[str]) -> Items:
    """Yield every line that is not blank. Raises RowError at one that is longer than a row may be."""
    for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), ""), start=1):
        if len(line) > LONGEST:
            raise TooLongError(number)
        if not line.isspace():
            yield number, line


def array_or_lines(file: IO[str]) -> Items:
    """Yield the objects of a JSON array, without holding the file, or lines if it is none.

    Raises RowError at an item that is longer than a row may be.
    """
    head = file.read(READ)
    if not head.lstrip().startswith("["):
        file.seek(0)
        yield from lines(file)
        return
    decoder, line = json.JSONDecoder(), 1
    at = head.index("[") + 1
    line, text = line + head.count("\n", 0, at), head
    while True:
        start = _SEPARATORS.match(text, at).end()  # type: ignore[union-attr]
        line, at = line + text.count("\n", at, start), start
        if text.startswith("]", at):
            return
        try:
            _, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            text, at = text[at:], 0
            if len(text) > LONGEST:
                raise TooLongError(line) from None
            more = file.read(max(READ, len(text)))  # the item may go on; twice as much, so that long ones stay linear
            if not more:
                if text:
                    yield line, text  # not JSON, as the parser will say
                return
            text += more
            continue
        yield line, text[at:end]
        line, at = line + text.count("\n", at, end), end


def json_or_csv(file: IO[str]) -> Items:
    """Yield the objects of a JSON array, JSON lines, or the records of a CSV file, whose cells may have line breaks.

    Raises RowError at an item that is longer than a row may be.
    """
    first = file.read(READ).lstrip()[:1]
    file.seek(0)
    if first in ("[", "{"):
        yield from array_or_lines(file)
        return
    record, start = "", 1
    for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), ""), start=1):
        record = record + line if record else line
        if len(record) > LONGEST:
            raise TooLongError(start)
        if record.count('"') % 2 == 0:
            if not record.isspace():
                yield start, record
            record, start = "", number + 1
    if record:
        yield start, record


def mapping(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(value, dict):
        raise RowError("not a JSON object")
    return value


def has_keys(line: str, keys: Collection[str]) -> bool:
    """Return True if a line looks like a JSON object with these keys. It may be cut off: lines can be very long."""
    return line.lstrip().startswith("{") and all(f'"{key}"' in line for key in keys)


def has_columns(text: str, names: Collection[str]) -> bool:
    """Return True if a text looks like an array or a line of JSON objects, or like CSV, with these keys or columns."""
    if text.lstrip("[ \t\r\n").startswith("{"):
        return all(f'"{name}"' in text for name in names)
    return set(names) <= set(cells(text.partition("\n")[0]) or ())


def document(value: Any) -> Any:
    """Read a field that holds JSON, or a text of JSON as in a CSV; other texts stay as they are."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def cells(record: str) -> list[str] | None:
    """Split a record of a CSV file; None if its quotes do not match."""
    record, found, at = record.rstrip("\r\n"), [], 0
    while True:
        match = _CELL.match(record, at)
        if match is None:
            return None
        quoted, plain, separator = match.groups()
        found.append(plain.strip() if quoted is None else quoted.replace('""', '"'))
        if not separator:
            return found
        at = match.end()


def table(row_of: Callable[[Mapping[str, Any]], Iterable[Any]], required: Collection[str]) -> Parse:
    """Make a parser of JSON objects, or of the records of a CSV file, of which the first is the header."""
    header: list[str] = []

    def parse(text: str) -> Iterable[Any]:
        if not header and text.lstrip().startswith("{"):
            return row_of(mapping(text))
        found = cells(text)
        if found is None:
            raise RowError("a cell's quotes do not match")
        if not header:
            if missing := [name for name in required if name not in found]:
                raise RowError(f"the header has no column {missing[0]!r}")
            header.extend(found)
            return ()
        if len(found) != len(header):
            raise RowError(f"{len(found)} cells where the header has {len(header)}")
        return row_of({name: cell for name, cell in zip(header, found, strict=True) if cell != ""})

    return parse


def whole(row: Mapping[str, Any], name: str) -> int:
    """Read an integer field; one without a fraction may be written as 5.0. Raises RowError."""
    if type(value := row.get(name)) is int:
        return value
    value = number(row, name)
    if not value.is_integer():
        raise RowError(f"{name} must be an integer, not {row[name]!r}")
    return int(value)


def number(row: Mapping[str, Any], name: str) -> float:
    """Read a numeric field, which in a CSV is text; it may be infinite. Raises RowError."""
    value = row[name] if name in row else field(row, name)
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise RowError(f"{name} must be a number, not {value!r:.50}")


def field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise RowError(f"{name} is missing")
    return row[name]


def listed(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row[name] if name in row else field(row, name)
    if not isinstance(value, list):
        raise RowError(f"{name} must be a list, not {type(value).__name__}")
    return value


def csv_rows(row_of: Callable[[Mapping[str, str]], Row | None], required: Collection[str]) -> Parse:
    """Make a parser of lines of which the first is the header."""
    header: list[str] = []

    def parse(line: str) -> Iterable[Row | None]:
        found = [cell.strip().strip('"') for cell in line.rstrip("\r\n").split(",")]
        first = not header
        if first:
            header.extend(found)
        if missing := [name for name in required if name not in header]:
            raise RowError(f"the header has no column {missing[0]!r}")
        if first:
            return ()
        if len(found) != len(header):
            raise RowError(f"{len(found)} cells where the header has {len(header)}")
        return (row_of(dict(zip(header, found, strict=True))),)

    return parse

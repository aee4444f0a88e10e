"""What the readers share: fields of a row, and the shape of a format."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as field_of
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.traces.columns import Row, RowError

if TYPE_CHECKING:
    from warmkv.simulator.traces.calls import Call

# From an item of a file to its requests; None for one that is left out on purpose, an error for one of several that is
# broken. Raises RowError.
Parse = Callable[[str], "Iterable[Row | RequestRecord | Call | RowError | None]"]
Items = Iterator[tuple[int, str]]  # line number, text
READ = 1 << 20  # characters read at a time
LONGEST = 1 << 28  # characters of a row, as it is held in memory
_SEPARATORS = re.compile(r"[ \t\r\n,\[\]]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?')  # also one that is cut off, so that no line is searched twice
_CELL = re.compile(r'(?:\s*"([^"]*(?:""[^"]*)*)"\s*|([^,"]*))(,|$)')


class TooLongError(RowError):
    """A row that is too long to be held in memory; nothing after it can be read."""

    def __init__(self, line: int) -> None:
        super().__init__(f"a row has more than {LONGEST:,} characters")
        self.line = line


@dataclass(slots=True)
class Learned:
    """What files of a log have told that holds for those after them."""

    scales: dict[str, float] = field_of(default_factory=dict)  # bytes of text that a token stands for, by model
    hashes: dict[bytes, bytes] = field_of(default_factory=dict)  # equal ones share one object
    sessions: dict[str, int] = field_of(default_factory=dict)  # numbers of sessions whose blocks are their own
    end: float = 0.0  # seconds, of runs that follow each other
    cut: int = 0  # prompts of which the log has a part


@dataclass(frozen=True, slots=True)
class Reading:
    """What a caller may say about a file. None where the format knows."""

    block_size: int | None = None  # tokens in a block, of formats that do not tell
    characters_per_token: float | None = None  # of formats that have texts
    scope: str = "global"  # who shares prefixes, of formats with records: all, or each `session` or `tenant`
    file: Path | None = None  # that is read now
    learned: Learned = field_of(default_factory=Learned)


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    recognises: Callable[[str], bool]  # a line of the file
    parser: Callable[[Reading], Parse] | None  # of an item; None where lines are read many at a time, as columns
    items: Callable[[IO[str]], Items]
    note: str = ""  # what the reader assumes
    records: bool = False  # whether its requests are records, with breakpoints, tenants and usage of their own
    is_file_local: bool = False  # whether times, or numbers of blocks and sessions, mean something within a file alone


def lines(file: IO[str]) -> Items:
    """Yield every line that is not blank. Raises RowError at one that is longer than a row may be."""
    for number, line in _numbered(file):
        if not line.isspace():
            yield number, line


def _numbered(file: IO[str]) -> Items:
    for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), ""), start=1):
        if len(line) > LONGEST:
            raise TooLongError(number)
        yield number, line


def objects(file: IO[str]) -> Items:
    """Yield JSON objects: on a line each, over many lines as `jq` writes them, or of an array; the file is not held.

    Raises RowError at an object that is longer than a row may be.
    """
    first = file.read(READ).lstrip()[:1]
    file.seek(0)
    return _array(file) if first == "[" else _lines_or_spread(file)


def _lines_or_spread(file: IO[str]) -> Items:
    """Yield lines, or all lines of an object together that begins on one and ends on another.

    An object that does not end, as where a line was cut off, is yielded line by line. One that begins a line without
    indentation is in another only behind a comma or the beginning of an array.
    """
    held, start, depth, last = io.StringIO(), 0, 0, ""
    for number, line in _numbered(file):
        if depth and line.startswith("{") and not last.endswith((",", "[")):
            yield from _again(held, start)
            depth = 0
        if depth:
            held.write(line)
            depth += _depth(line)
            last = line.rstrip() or last
            if held.tell() > LONGEST:
                raise TooLongError(start)
            if depth <= 0:
                yield start, held.getvalue()
                depth = 0
        elif line.endswith(("}\n", "}")) or not line.lstrip().startswith("{"):
            if not line.isspace():
                yield number, line
        elif (depth := _depth(line)) > 0:
            held, start, last = io.StringIO(), number, line.rstrip()
            held.write(line)
        else:
            yield number, line
            depth = 0
    if depth:
        yield from _again(held, start)


def _again(held: IO[str], start: int) -> Items:
    """Yield lines that were held, numbered from `start` on."""
    held.seek(0)
    return ((number, line) for number, line in enumerate(held, start) if not line.isspace())


def _depth(line: str) -> int:
    """Return how many objects and arrays begin on a line without ending on it, less those that end alone."""
    bare = _STRING.sub("", line)
    return bare.count("{") + bare.count("[") - bare.count("}") - bare.count("]")


def _array(file: IO[str]) -> Items:
    """Yield the objects of arrays that follow each other."""
    decoder, line, text, at = json.JSONDecoder(), 1, "", 0
    while True:
        start = _SEPARATORS.match(text, at).end()  # type: ignore[union-attr]
        line, at = line + text.count("\n", at, start), start
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
    """Yield JSON objects as `objects` does, or the records of a CSV file, whose cells may have line breaks.

    Raises RowError at an item that is longer than a row may be.
    """
    first = file.read(READ).lstrip()[:1]
    file.seek(0)
    return objects(file) if first in ("[", "{") else _csv_records(file)


def _csv_records(file: IO[str]) -> Items:
    held, start, size, quotes = list[str](), 1, 0, 0
    for number, line in _numbered(file):
        held.append(line)
        size, quotes = size + len(line), quotes + line.count('"')
        if size > LONGEST:
            raise TooLongError(start)
        if quotes % 2 == 0:
            record = "".join(held)
            if not record.isspace():
                yield start, record
            held, start, size, quotes = [], number + 1, 0, 0
    if held:
        yield start, "".join(held)


def mapping(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(value, dict):
        raise RowError("not a JSON object")
    return value


def has_keys(line: str, keys: Collection[str]) -> bool:
    """Return True if a text looks like an object with these keys, or an array of them; long ones may be cut off."""
    return line.lstrip("[ \t\r\n").startswith("{") and all(f'"{key}"' in line for key in keys)


def has_columns(text: str, names: Collection[str]) -> bool:
    """Return True if a text looks like an array or a line of JSON objects, or like CSV, with these keys or columns."""
    if text.lstrip("[ \t\r\n").startswith("{"):
        return all(f'"{name}"' in text for name in names)
    return has_header(text.partition("\n")[0], names)


def has_header(line: str, names: Collection[str]) -> bool:
    """Return True if a line looks like the header of a CSV file with these columns."""
    return all(name in line for name in names) and set(names) <= set(cells(line) or ())


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
    """Make a parser of JSON objects, also in pages of an API, or of the records of a CSV file after its header."""
    header: list[str] = []

    def row_of_page(item: Any) -> Iterable[Any]:
        if not isinstance(item, dict):
            raise RowError("not a JSON object")
        return row_of(item)

    def parse(text: str) -> Iterable[Any]:
        if not header and text.lstrip().startswith("{"):
            row = mapping(text)
            page = row.get("data")
            if isinstance(page, list) and not any(name in row for name in required):
                return each(page, row_of_page)
            return row_of(row)
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


def each(items: Iterable[Any], read: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield what is read of items that stand together, or the error of one that is broken, which costs no other."""
    for item in items:
        try:
            yield from read(item)
        except RowError as error:
            yield error


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

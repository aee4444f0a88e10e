"""What the readers share: fields of a row, and the shape of a format."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.traces.columns import Row, RowError

# From an item of a file to its requests; None for one that is left out on purpose. Raises RowError.
Parse = Callable[[str], Iterable[Row | RequestRecord | None]]
Items = Iterator[tuple[int, str]]  # line number, text


@dataclass(frozen=True, slots=True)
class Reading:
    """What a caller may say about a file. None where the format knows."""

    block_size: int | None = None  # tokens in a block, of formats that do not tell
    characters_per_token: float = 4.0  # of formats that have texts and no counts


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    recognises: Callable[[str], bool]  # a line of the file
    parser: Callable[[Reading], Parse]
    items: Callable[[IO[str]], Items]
    note: str = ""  # what the reader assumes


def lines(file: IO[str]) -> Items:
    """Yield every line that is not blank."""
    return ((number, line) for number, line in enumerate(file, start=1) if line and not line.isspace())


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
        cells = [cell.strip().strip('"') for cell in line.rstrip("\r\n").split(",")]
        first = not header
        if first:
            header.extend(cells)
        if missing := [name for name in required if name not in header]:
            raise RowError(f"the header has no column {missing[0]!r}")
        if first:
            return ()
        if len(cells) != len(header):
            raise RowError(f"{len(cells)} cells where the header has {len(header)}")
        return (row_of(dict(zip(header, cells, strict=True))),)

    return parse

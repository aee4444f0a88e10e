"""Reading an access log: the requests that can be replayed, and an account of the lines that cannot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from warmkv.prefixes.packed_keys import number
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.traces.reader import Rows


@dataclass(frozen=True, slots=True)
class Log:
    """Requests in the order of arrival, and what was left out."""

    requests: tuple[RequestRecord, ...]
    broken: int = 0  # lines that are no records
    skipped: int = 0  # records of requests that failed or were cancelled
    faults: tuple[str, ...] = ()  # FILE:LINE: reason, of the first broken lines


def read(path: Path, *, strict: bool = False) -> Log:
    """Read a file of JSON lines as the gateway writes it, also as .gz, or a folder of them. Blank lines are ignored.

    Raises TraceError if a file cannot be read, or at the first broken line if `strict`.
    """
    rows = Rows(path, "warmkv", strict=strict)
    return Log(records(rows), rows.broken, rows.skipped, tuple(rows.faults))


def records(rows: Rows) -> tuple[RequestRecord, ...]:
    """Return the records of a log in the order of arrival."""
    found = [row for row in rows if isinstance(row, RequestRecord)]
    number(record.hashes for record in found)
    return tuple(sorted(found, key=lambda record: record.arrival))

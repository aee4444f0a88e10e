"""Reading an access log: the requests that can be replayed, and an account of the lines that cannot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from warmkv.gc_pause import gc_paused
from warmkv.prefixes.record import RecordError, RequestRecord
from warmkv.prefixes.record_builder import Builder
from warmkv.prefixes.record_columns import RecordColumns
from warmkv.simulator.traces.columns import TraceError
from warmkv.simulator.traces.reader import Rows
from warmkv.simulator.traces.warmkv import LogLines


@dataclass(frozen=True, slots=True)
class Log:
    """Requests in the order of arrival, and what was left out."""

    requests: RecordColumns
    broken: int = 0  # lines that are no records
    skipped: int = 0  # records of requests that failed, were cancelled, or have no prompt
    faults: tuple[str, ...] = ()  # FILE:LINE: reason, of the first broken lines


def read(path: Path, *, strict: bool = False) -> Log:
    """Read a file of JSON lines as the gateway writes it, also as .gz, or a folder of them. Blank lines are ignored.

    Raises TraceError if a file cannot be read, or at the first broken line if `strict`.
    """
    rows = Rows(path, "warmkv", strict=strict)
    with gc_paused():
        return Log(records(rows), rows.broken, rows.skipped, tuple(rows.faults))


def records(rows: Rows) -> RecordColumns:
    """Return the records of a log in the order of arrival. Raises TraceError."""
    builder, others = Builder(), []
    for item in rows:
        if isinstance(item, LogLines):
            builder.add(item.chunk)
        elif isinstance(item, RequestRecord):
            others.append(item)
    try:
        builder.extend(others)
    except RecordError as error:
        raise TraceError(str(error)) from None
    found = builder.build()
    served = found.is_named("status", "ok") & (found.input_tokens > 0)
    return (found if served.all() else found.take(served)).by_arrival()

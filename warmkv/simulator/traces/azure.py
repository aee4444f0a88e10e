"""Azure LLM inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens. They have no block hashes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from warmkv.simulator.traces.columns import Row, RowError
from warmkv.simulator.traces.rows import Format, Parse, Reading, csv_rows, lines, whole

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def parser(reading: Reading) -> Parse:
    return csv_rows(_row, COLUMNS)


def _row(cells: Mapping[str, str]) -> Row:
    try:
        moment = datetime.fromisoformat(cells["TIMESTAMP"])
    except ValueError:
        raise RowError(f"TIMESTAMP must be a date and a time, not {cells['TIMESTAMP']!r}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return Row(moment.timestamp(), whole(cells, "ContextTokens"), whole(cells, "GeneratedTokens"))


AZURE = Format("azure", lambda line: all(column in line for column in COLUMNS), parser, lines)

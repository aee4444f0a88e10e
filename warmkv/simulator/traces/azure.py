"""Azure LLM inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens. They have no block hashes."""

from __future__ import annotations

from collections.abc import Mapping

from warmkv.simulator.traces.calls import moment
from warmkv.simulator.traces.columns import Row
from warmkv.simulator.traces.rows import Format, Parse, Reading, csv_rows, has_header, lines, whole

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def parser(reading: Reading) -> Parse:
    return csv_rows(_row, COLUMNS)


def _row(cells: Mapping[str, str]) -> Row:
    arrival = moment(cells["TIMESTAMP"], "TIMESTAMP")
    return Row(arrival, whole(cells, "ContextTokens"), whole(cells, "GeneratedTokens"))


AZURE = Format("azure", lambda line: has_header(line, COLUMNS), parser, lines)

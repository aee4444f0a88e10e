"""BurstGPT: CSV of Timestamp in seconds, Request tokens, Response tokens, in some releases Session ID. No block hashes.

A row without response tokens is a request that failed.
"""

from __future__ import annotations

from collections.abc import Mapping

from warmkv.simulator.traces.columns import Row
from warmkv.simulator.traces.rows import Format, Parse, Reading, csv_rows, has_header, lines, number, whole

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def parser(reading: Reading) -> Parse:
    return csv_rows(_row, COLUMNS)


def _row(cells: Mapping[str, str]) -> Row | None:
    output = whole(cells, "Response tokens")
    if output == 0:
        return None
    session = cells.get("Session ID") or None
    return Row(number(cells, "Timestamp"), whole(cells, "Request tokens"), output, session=session)


BURSTGPT = Format("burstgpt", lambda line: has_header(line, COLUMNS), parser, lines, is_file_local=True)

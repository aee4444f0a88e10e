"""Requests that a server really answered, with the times that were measured: what calibration fits to.

JSON lines. Of each row one name of every group must be there; times are seconds on one clock.

| what | names |
|---|---|
| prompt tokens | input_tokens, input_toks, prompt_tokens, input_length, prompt_len |
| generated tokens | output_tokens, output_toks, completion_tokens, output_length, output_len |
| when the server took it | queued_ts, arrival, arrival_ts, arrival_time, arrived |
| first token | first_token_ts, first_token, first_token_time, or ttft in seconds from the arrival |
| last token | last_token_ts, last_token, last_token_time, or e2e in seconds from the arrival |
| prompt tokens found in a cache (may be left out) | cached_tokens |

So a record of warmkv's access log is such a row, too. A row with a `status` other than "ok" is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warmkv.simulator.traces import KEPT_FAULTS, RowError, TraceError
from warmkv.simulator.traces.files import text_of
from warmkv.simulator.traces.rows import mapping, number, objects, whole

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INPUT = ("input_tokens", "input_toks", "prompt_tokens", "input_length", "prompt_len")
OUTPUT = ("output_tokens", "output_toks", "completion_tokens", "output_length", "output_len")
ARRIVAL = ("queued_ts", "arrival", "arrival_ts", "arrival_time", "arrived")
FIRST = ("first_token_ts", "first_token", "first_token_time")
LAST = ("last_token_ts", "last_token", "last_token_time")


@dataclass(frozen=True, slots=True)
class Measured:
    """n requests in the order of arrival; times are seconds from the first arrival."""

    arrival: Floats
    prompt: Ints
    output: Ints
    cached: Ints
    first: Floats  # when the first token came
    last: Floats  # when the last one came; of a single token, the same
    broken: int = 0
    skipped: int = 0
    faults: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival)


def read(path: Path, *, strict: bool = False) -> Measured:
    """Read a file of JSON lines. Raises TraceError if it cannot be read, or at the first broken row if `strict`."""
    rows: list[tuple[float, int, int, int, float, float]] = []
    faults: list[str] = []
    broken = skipped = 0
    with text_of(path) as file:
        for line, text in objects(file):
            try:
                row = mapping(text)
                if row.get("status", "ok") != "ok":
                    skipped += 1
                else:
                    rows.append(_request(row))
            except RowError as error:
                fault = f"{path}:{line}: {error}"
                if strict:
                    raise TraceError(fault) from None
                broken += 1
                if len(faults) < KEPT_FAULTS:
                    faults.append(fault)
    rows.sort(key=lambda row: row[0])
    table = np.array(rows, dtype=float).reshape(len(rows), 6).T
    start = table[0, 0] if rows else 0.0
    prompt, output, cached = table[1:4].astype(np.int64)
    times = table[[0, 4, 5]] - start
    return Measured(times[0], prompt, output, cached, times[1], times[2], broken, skipped, tuple(faults))


def _request(row: Mapping[str, Any]) -> tuple[float, int, int, int, float, float]:
    arrival = number(row, _name(row, ARRIVAL))
    first = arrival + number(row, "ttft") if "ttft" in row else number(row, _name(row, FIRST))
    last = arrival + number(row, "e2e") if "e2e" in row else number(row, _name(row, LAST))
    prompt, output = whole(row, _name(row, INPUT)), whole(row, _name(row, OUTPUT))
    cached = whole(row, "cached_tokens") if "cached_tokens" in row else 0
    if prompt < 1 or output < 1 or not 0 <= cached <= prompt:
        raise RowError(f"{prompt} prompt tokens, {cached} of them cached, and {output} generated cannot be")
    if not -np.inf < arrival < first <= last < np.inf:
        raise RowError(
            f"arrival {arrival}, first token {first} and last token {last} must follow in time, on one clock"
        )
    return arrival, prompt, output, min(cached, prompt - 1), first, last


def _name(row: Mapping[str, Any], names: Collection[str]) -> str:
    for name in names:
        if name in row:
            return name
    raise RowError(f"one of {', '.join(names)} is missing")

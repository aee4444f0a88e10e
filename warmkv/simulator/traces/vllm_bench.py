"""Results of `vllm bench serve --save-result --save-detailed`: one JSON object, or a line for each appended run.

They have no prompts, so no prefix is found. Runs follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from warmkv.simulator.traces.columns import Row, RowError
from warmkv.simulator.traces.rows import Format, Parse, Reading, has_keys, listed, mapping, number, objects, whole

KEYS = ("model_id", "num_prompts", "request_rate")
COLUMNS = ("start_times", "input_lens", "output_lens")


def parser(reading: Reading) -> Parse:
    learned = reading.learned

    def parse(text: str) -> Iterable[Row | None]:
        result = mapping(text)
        if missing := [name for name in COLUMNS if name not in result]:
            raise RowError(f"{missing[0]} is missing: run `vllm bench serve` with --save-result --save-detailed")
        columns = [listed(result, name) for name in COLUMNS]
        errors = result.get("errors") or [""] * len(columns[0])
        if len({len(errors), *map(len, columns)}) > 1:
            raise RowError(f"{', '.join(COLUMNS)} and errors must have an item for each request")
        names = dict.fromkeys(COLUMNS)
        rows = [
            _row(dict(zip(names, values, strict=True)), failed)
            for *values, failed in zip(*columns, errors, strict=True)
        ]
        start = min((row.arrival for row in rows if row), default=0.0) - learned.end
        found = [row and Row(row.arrival - start, row.input_tokens, row.output_tokens) for row in rows]
        learned.end = max((row.arrival for row in found if row), default=learned.end)
        return found

    return parse


def _row(values: Mapping[str, Any], failed: Any) -> Row | None:
    if failed:
        return None
    return Row(number(values, "start_times"), whole(values, "input_lens"), whole(values, "output_lens"))


NOTE = "vllm bench keeps no prompts, so they share nothing"
VLLM_BENCH = Format("vllm-bench", lambda line: has_keys(line, KEYS), parser, objects, NOTE)

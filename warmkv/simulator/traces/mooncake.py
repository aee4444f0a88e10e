"""Mooncake JSONL: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens.

The last block of a prompt has an id, too, even if it is partial. Other tools write this form with other block sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from warmkv.simulator.traces.columns import Row, Trace
from warmkv.simulator.traces.rows import Format, Parse, Reading, has_keys, listed, mapping, number, objects, whole
from warmkv.terminal import text_output

BLOCK = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def parser(reading: Reading) -> Parse:
    size = reading.block_size or BLOCK

    def parse(line: str) -> Iterable[Row]:
        row = mapping(line)
        found = Row(
            arrival=number(row, "timestamp") / 1000,
            input_tokens=whole(row, "input_length"),
            output_tokens=whole(row, "output_length"),
            blocks=listed(row, "hash_ids"),
            block_size=size,
        )
        return (found,)

    return parse


def write(trace: Trace, path: Path) -> int:
    """Write a trace in this form, its blocks numbered as they come; return the number of lines. Raises OSError.

    `-` is standard output. Whoever reads it must know the block size, and does not learn of sessions and tenants.
    """
    _, first, number = np.unique(trace.blocks, return_index=True, return_inverse=True)
    ids = np.argsort(np.argsort(first))[number].tolist()
    start = float(trace.arrival[0]) if len(trace) else 0.0
    with text_output(path) as out:
        for i in range(len(trace)):
            row = {
                "timestamp": round((float(trace.arrival[i]) - start) * 1000, 3),
                "input_length": int(trace.input_tokens[i]),
                "output_length": int(trace.output_tokens[i]),
                "hash_ids": ids[trace.offsets[i] : trace.offsets[i + 1]],
            }
            out.write(json.dumps(row) + "\n")
    return len(trace)


MOONCAKE = Format(
    "mooncake", lambda line: has_keys(line, KEYS) and '"chat_id"' not in line, parser, objects, is_file_local=True
)

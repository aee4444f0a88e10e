"""Mooncake JSONL: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens.

The last block of a prompt has an id, too, even if it is partial. Other tools write this form with other block sizes.
"""

from __future__ import annotations

from collections.abc import Iterable

from warmkv.simulator.traces.columns import Row
from warmkv.simulator.traces.rows import Format, Parse, Reading, has_keys, lines, listed, mapping, number, whole

BLOCK = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def parser(reading: Reading) -> Parse:
    size = reading.block_size or BLOCK

    def parse(line: str) -> Iterable[Row]:
        row = mapping(line)
        yield Row(
            arrival=number(row, "timestamp") / 1000,
            input_tokens=whole(row, "input_length"),
            output_tokens=whole(row, "output_length"),
            blocks=listed(row, "hash_ids"),
            block_size=size,
        )

    return parse


MOONCAKE = Format("mooncake", lambda line: has_keys(line, KEYS) and '"chat_id"' not in line, parser, lines)

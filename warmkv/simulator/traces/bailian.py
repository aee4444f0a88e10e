"""Qwen-Bailian JSONL: `timestamp` in seconds, lengths, `hash_ids` of blocks of 16 tokens, `chat_id` of the request and
`parent_chat_id` of the turn before it (-1 for a first turn)."""

from __future__ import annotations

from collections.abc import Iterable

from warmkv.simulator.traces.columns import Row
from warmkv.simulator.traces.rows import Format, Parse, Reading, has_keys, listed, mapping, number, objects, whole

BLOCK = 16
KEYS = ("chat_id", "parent_chat_id", "timestamp", "input_length")


def parser(reading: Reading) -> Parse:
    size = reading.block_size or BLOCK
    sessions: dict[int, int] = {}  # request -> the first of its session

    def parse(line: str) -> Iterable[Row]:
        row = mapping(line)
        chat, parent = whole(row, "chat_id"), whole(row, "parent_chat_id")
        sessions[chat] = session = sessions.get(parent, chat if parent < 0 else parent)
        yield Row(
            arrival=number(row, "timestamp"),
            input_tokens=whole(row, "input_length"),
            output_tokens=whole(row, "output_length"),
            blocks=listed(row, "hash_ids"),
            block_size=size,
            session=str(session),
        )

    return parse


BAILIAN = Format("bailian", lambda line: has_keys(line, KEYS), parser, objects, is_file_local=True)

"""ShareGPT: conversations as texts, in one JSON array or an object a line. Every answer is a request.

A request's prompt is all that was said before it. There are neither times nor token counts: all arrive at 0, and a
token stands for a number of characters that the caller may set.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import IO, Any

from warmkv.simulator.traces.columns import Row, RowError
from warmkv.simulator.traces.rows import Format, Items, Parse, Reading, lines, listed, mapping

BLOCK = 16  # tokens, if the caller does not say
READ = 1 << 20  # characters read at a time
ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "assistant")


def parser(reading: Reading) -> Parse:
    size = reading.block_size or BLOCK
    per_token = reading.characters_per_token

    def tokens(text: str) -> int:
        return max(1, int(len(text) / per_token))

    def parse(text: str) -> Iterable[Row]:
        conversation = mapping(text)
        name, said, blocks = str(conversation.get("id", "")), "", _Blocks(size * per_token)
        for turn in listed(conversation, "conversations"):
            speaker, words = _turn(turn)
            if speaker in ASSISTANTS and said:
                prompt = tokens(said)
                yield Row(0.0, prompt, tokens(words), blocks.of(said, prompt // size), size, name)
            said += words

    return parse


class _Blocks:
    """Chained hashes of a text that grows."""

    def __init__(self, characters: float) -> None:
        self._characters, self._end = characters, 0  # of a block; of the last one hashed
        self._digest, self._hashes = hashlib.blake2b(digest_size=8), list[int]()

    def of(self, text: str, count: int) -> list[int]:
        """Return the hashes of its first `count` blocks."""
        while len(self._hashes) < count:
            start, self._end = self._end, math.ceil((len(self._hashes) + 1) * self._characters)
            self._digest.update(text[start : self._end].encode("utf-8", "surrogatepass"))
            self._hashes.append(int.from_bytes(self._digest.digest(), "little", signed=True))
        return self._hashes[:count]


def _turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise RowError("a turn is no JSON object")
    speaker, words = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or not isinstance(words, str):
        raise RowError("a turn needs the texts `from` and `value`")
    return speaker, words


def items(file: IO[str]) -> Items:
    """Yield the objects of a JSON array, without holding the file, or lines if it is none."""
    head = file.read(READ)
    if not head.lstrip().startswith("["):
        file.seek(0)
        yield from lines(file)
        return
    decoder, line = json.JSONDecoder(), 1
    text = head.lstrip().removeprefix("[")
    line += head[: len(head) - len(text)].count("\n")
    while True:
        bare = text.lstrip(" \t\r\n,")
        line += text[: len(text) - len(bare)].count("\n")
        text = bare
        if text.startswith("]"):
            return
        try:
            _, end = decoder.raw_decode(text)
        except json.JSONDecodeError:
            more = file.read(max(READ, len(text)))  # the item may go on; twice as much, so that long ones stay linear
            if not more:
                if text:
                    yield line, text  # not JSON, as the parser will say
                return
            text += more
            continue
        yield line, text[:end]
        line += text[:end].count("\n")
        text = text[end:]


SHAREGPT = Format(
    "sharegpt",
    lambda line: '"conversations"' in line,
    parser,
    items,
    "no times: all requests arrive at 0; tokens are counted by characters",
)

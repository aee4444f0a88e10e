"""ShareGPT: conversations as texts, in one JSON array or an object a line. Every answer is a request.

A request's prompt is all that was said before it. There are neither times nor token counts: all arrive at 0, and a
token stands for a number of characters that the caller may set.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

from warmkv.simulator.traces.columns import Row, RowError
from warmkv.simulator.traces.rows import Format, Parse, Reading, listed, mapping, objects

BLOCK = 16  # tokens, if the caller does not say
CHARACTERS_PER_TOKEN = 4.0  # likewise
ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "assistant")


def parser(reading: Reading) -> Parse:
    size = reading.block_size or BLOCK
    per_token = reading.characters_per_token or CHARACTERS_PER_TOKEN

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


SHAREGPT = Format(
    "sharegpt",
    lambda line: '"conversations"' in line,
    parser,
    objects,
    "no times: all requests arrive at 0; tokens are counted by characters",
)

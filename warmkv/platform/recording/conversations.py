"""Prompts of recorded answers that later requests of the Responses API go on from, as names of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_BLOCKS = 1 << 20  # of all remembered prompts, each counted as a whole


def conversation_of(body: Mapping[str, Any]) -> str:
    """Return the name of the conversation that a request adds to; empty for none."""
    conversation = body.get("conversation")
    name = conversation.get("id") if isinstance(conversation, dict) else conversation
    return name if isinstance(name, str) else ""


def earlier(body: Mapping[str, Any]) -> str:
    """Return the name of the answer or the conversation that a request goes on from; empty for none."""
    name = body.get("previous_response_id")
    return name if isinstance(name, str) and name else conversation_of(body)


class Conversations:
    """Remember the blocks of the latest prompts, by tenant and by the names under which a request may go on from them.

    A prompt begins with its tools and instructions, of which those of an earlier request are not taken along: where
    they differ, in `head`, it has nothing of it.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most, self._blocks = most_blocks, 0
        self._known: OrderedDict[tuple[str, str], tuple[bytes, Sequence[bytes]]] = OrderedDict()  # latest used last

    def add(self, tenant: str, names: Iterable[str], head: bytes, hashes: Sequence[bytes]) -> None:
        """Remember a prompt's blocks; the oldest prompts go where there are too many."""
        for name in filter(None, names):
            self._drop((tenant, name))
            self._known[tenant, name] = (head, hashes)
            self._blocks += 1 + len(hashes)
        while self._blocks > self._most:
            self._drop(next(iter(self._known)))

    def prefix(self, tenant: str, name: str, head: bytes) -> Sequence[bytes]:
        """Return the blocks of the prompt that goes by a name; none where it is unknown or its head another."""
        if (known := self._known.get((tenant, name))) is None:
            return ()
        self._known.move_to_end((tenant, name))
        return known[1] if known[0] == head else ()

    def _drop(self, key: tuple[str, str]) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self._blocks -= 1 + len(known[1])

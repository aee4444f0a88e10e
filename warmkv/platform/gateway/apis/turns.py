"""A conversation as all APIs read it: turns of content blocks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from warmkv.platform.gateway.apis.tokens import Place

Role = Literal["tools", "system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ContentBlock:
    """Hold a content block: its text, and the TTL name if it is marked with cache_control.

    In a turn of `tools` the text is a tool's definition as JSON; where `call` names a tool, its arguments as JSON. Of
    both, `value` is the same as Python objects. `id` is that of a call, or of the call that a result answers. `place`
    is where it stands in the request.
    """

    text: str
    ttl: str | None = None
    call: str | None = None
    value: Any = field(default=None, compare=False)
    place: Place = field(default=(), compare=False)
    id: str | None = field(default=None, compare=False)

    @classmethod
    def of_value(
        cls, value: Any, ttl: str | None = None, call: str | None = None, place: Place = (), id_: str | None = None
    ) -> ContentBlock:
        """Return the block of a tool's definition, or of the arguments of a call."""
        return cls(to_json(value), ttl, call, value, place, id_)


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold a message: who speaks, and its content blocks. The tools come first, as a turn of their own.

    `thinking` comes before an assistant's blocks; the template shows it, or leaves it out.
    """

    role: Role
    blocks: tuple[ContentBlock, ...]
    thinking: str = ""


def flat(turns: Sequence[Turn]) -> list[tuple[Turn, ContentBlock]]:
    """Return all content blocks in their order, each with its turn."""
    return [(turn, block) for turn in turns for block in turn.blocks]


def is_json(turn: Turn, block: ContentBlock) -> bool:
    """Return True where the template shows a block as JSON, rather than as a message's text."""
    return turn.role == "tools" or block.call is not None


def leading(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Return the turns before the messages: the tools and the system prompt."""
    return list(itertools.takewhile(lambda turn: turn.role in ("tools", "system"), turns))


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as the templates' own filter writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)

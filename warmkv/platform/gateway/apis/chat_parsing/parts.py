"""What an answer is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments` is a JSON object."""

    name: str
    arguments: str


Part = Text | Thinking | ToolCall


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return the parts of a whole answer, with pieces of one text, or of one thinking, joined."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + part.text)
        elif isinstance(part, Thinking) and isinstance(last, Thinking):
            found[-1] = Thinking(last.text + part.text)
        else:
            found.append(part)
    return found

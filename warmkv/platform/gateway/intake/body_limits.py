"""Limits of a request body, checked in linear time before anything is made of it. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from warmkv.config import IntakeConfig
from warmkv.platform.gateway.apis.errors import ApiError, invalid

PARSER_DEPTH = 200  # nesting at which pydantic_core.from_json gives up

# Possessive, and an open string ends with the data: nothing is read twice, whatever is sent. Escapes are gone before.
_STRING = rb'"[^"]*+(?:"|\Z)'
_STRINGS = re.compile(_STRING)
_PIECE = re.compile(rb'(?:[^"]++|' + _STRING + rb"){1,4096}+")  # a pattern holds the GIL while it matches
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_bytes(data: bytes, intake: IntakeConfig) -> None:
    """Refuse JSON that has too many values or is nested too deep. Raises ApiError (400); what is no JSON passes."""
    check_depth = intake.max_depth < PARSER_DEPTH
    if _separators(data) < intake.max_values and not check_depth:  # an upper bound: commas in strings count, too
        return
    values, pieces = 1, []
    for piece in outside_strings(data):
        values += _separators(piece)
        if values > intake.max_values:  # the rest need not be read
            raise too_many("the body", values, "JSON values", intake.max_values, "max_values")
        pieces.append(piece)
    if check_depth and depth(b"".join(pieces)) > intake.max_depth:
        raise too_deep(intake.max_depth)


def check_counts(tree: Any, intake: IntakeConfig) -> None:
    """Refuse too many messages, blocks, tools, or too long stop sequences. Raises ApiError (400).

    `tree` is a parsed body of any API, not validated yet: what has another form is left to the validation.
    """
    if not isinstance(tree, dict):
        return
    messages, tools = _items(tree.get("messages")), _items(tree.get("tools"))
    if len(messages) > intake.max_messages:
        raise too_many("messages", len(messages), "messages", intake.max_messages, "max_messages")
    if len(tools) > intake.max_tools:
        raise too_many("tools", len(tools), "tools", intake.max_tools, "max_tools")
    contents = [_items(tree.get("system")), *(_items(one.get("content")) for one in messages if isinstance(one, dict))]
    blocks = sum(map(len, contents))
    blocks += sum(len(_items(one.get("content"))) for content in contents for one in content if isinstance(one, dict))
    if blocks > intake.max_blocks:
        raise too_many("messages", blocks, "content blocks", intake.max_blocks, "max_blocks")
    for name in ("stop", "stop_sequences"):
        stop = tree.get(name)
        found = [stop] if isinstance(stop, str) else _items(stop)
        characters = sum(len(text) for text in found if isinstance(text, str))
        if characters > intake.max_stop_characters:
            raise too_many(name, characters, "characters", intake.max_stop_characters, "max_stop_characters")


def outside_strings(data: bytes) -> Iterator[bytes]:
    """Yield JSON without its strings, in pieces; maybe less behind a backslash outside of them, where parsers end."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    return (_STRINGS.sub(b"", piece.group()) for piece in _PIECE.finditer(unescaped))


def depth(structure: bytes) -> int:
    """Return the deepest nesting of JSON without its strings."""
    steps = map(_STEPS.__getitem__, structure.translate(None, _NO_BRACKETS))
    return max(itertools.accumulate(steps), default=0)


def too_deep(limit: int) -> ApiError:
    return invalid(f"the body is nested deeper than {limit} (gateway.intake.max_depth)")


def too_many(place: str, found: int, unit: str, limit: int, setting: str) -> ApiError:
    return invalid(f"{place}: {found} {unit} are more than {limit} (gateway.intake.{setting})")


def _separators(data: bytes) -> int:
    """Count what stands before every JSON value and key but the first, strings of `data` included."""
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

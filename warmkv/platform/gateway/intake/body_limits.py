"""Limits of a request body, checked in linear time before anything is made of it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from warmkv.config import GatewayConfig
from warmkv.platform import json_values
from warmkv.platform.gateway.apis.errors import ApiError, invalid

PARSER_DEPTH = 200  # nesting at which pydantic_core.from_json gives up
BYTES_PER_VALUE = 64  # of the largest body
LEAST_VALUES = 500_000  # however small bodies must be: parsing so many holds the GIL for a fraction of a second


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may hold. A message and a content block take five values or more, a tool seven."""

    values: int  # of JSON, keys included
    messages: int
    blocks: int  # of content, in all messages together
    tools: int
    stop_characters: int  # of all stop sequences together

    @classmethod
    def of(cls, config: GatewayConfig) -> BodyLimits:
        """Return the limits that follow from the size of the largest body."""
        values = max(LEAST_VALUES, config.max_body_bytes // BYTES_PER_VALUE)
        return cls(values, values // 5, values * 2 // 5, values // 50, values // 30)


def check_bytes(data: bytes, limits: BodyLimits) -> None:
    """Refuse JSON that has too many values. Raises ApiError (400); what is no JSON passes."""
    values = json_values.count(data, limits.values)
    if values > limits.values:
        raise too_many("the body", values, "JSON values", limits.values)


def check_counts(tree: Any, limits: BodyLimits) -> None:
    """Refuse too many messages, blocks, tools, or too long stop sequences. Raises ApiError (400).

    `tree` is a parsed body of any API, not validated yet: what has another form is left to the validation.
    """
    if not isinstance(tree, dict):
        return
    messages, tools = _items(tree.get("messages")) or _items(tree.get("input")), _items(tree.get("tools"))
    if len(messages) > limits.messages:
        raise too_many("messages", len(messages), "messages", limits.messages)
    if len(tools) > limits.tools:
        raise too_many("tools", len(tools), "tools", limits.tools)
    contents = [_items(tree.get("system")), *(_items(one.get("content")) for one in messages if isinstance(one, dict))]
    blocks = sum(map(len, contents))
    blocks += sum(len(_items(one.get("content"))) for content in contents for one in content if isinstance(one, dict))
    if blocks > limits.blocks:
        raise too_many("messages", blocks, "content blocks", limits.blocks)
    for name in ("stop", "stop_sequences"):
        stop = tree.get(name)
        found = [stop] if isinstance(stop, str) else _items(stop)
        characters = sum(len(text) for text in found if isinstance(text, str))
        if characters > limits.stop_characters:
            raise too_many(name, characters, "characters", limits.stop_characters)


def check_finite(tree: Any) -> None:
    """Refuse numbers too large for float64, which were parsed as infinite. Raises ApiError (400).

    Answers that tell what was asked could not be written as JSON.
    """
    left = [tree]
    while left:
        value = left.pop()
        kind = type(value)
        if kind is dict:
            left += value.values()
        elif kind is list:
            left += value
        elif kind is float and math.isinf(value):
            raise invalid("Invalid JSON: a number is too large for float64")


def too_many(place: str, found: int, unit: str, limit: int) -> ApiError:
    return invalid(f"{place}: {found} {unit} are more than {limit}, which follows from gateway.max_body_bytes")


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

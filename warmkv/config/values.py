"""Values at dotted keys of a tree of plain values, as YAML and JSON documents have it."""

from __future__ import annotations

from typing import Any

import yaml

from warmkv.config import strict_yaml
from warmkv.config.base import ConfigError

Place = tuple[int | str, ...]
"""Where a value is in a tree, as pydantic names the place of a fault."""


def read_value(dotted: str, text: str) -> Any:
    """Parse a value as it is written behind `section.key=`. Raises ConfigError."""
    try:
        return strict_yaml.load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{dotted}: {text!r} is not a YAML value: {error}") from None


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a value at its key. Raises ConfigError where a plain value is in the way."""
    parent, leaf = _parent(tree, dotted, create=True)
    parent[leaf] = value


def discard(tree: dict[str, Any], dotted: str) -> bool:
    """Remove a key if it is there, and say so. Raises ConfigError where a plain value is in the way."""
    parent, leaf = _parent(tree, dotted, create=False)
    return parent.pop(leaf, parent) is not parent


def _parent(tree: dict[str, Any], dotted: str, *, create: bool) -> tuple[dict[str, Any], str]:
    *parents, leaf = dotted.strip().split(".")
    node = tree
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:
            if not create:
                return {}, leaf
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            place = ".".join(parents[:depth])
            raise ConfigError(f"{dotted}: {place} is already {node!r}; set it as a whole or write it as a mapping")
    return node, leaf

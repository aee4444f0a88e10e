"""Regular expressions within JSON schemas: where they are, and a schema without some of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

VALUES = frozenset(("const", "default", "enum", "examples"))  # keywords that have values, not schemas
NAMED = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))  # schemas by name


def patterns(schema: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the regular expressions of a schema, each with its place."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield ".".join((*place, "pattern")), pattern
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from ((".".join((*place, "patternProperties")), name) for name in named)
    for path, part in _parts(schema):
        yield from patterns(part, (*place, *path))


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the schemas directly within a schema, each with its place there."""
    for key, value in schema.items():
        if key in VALUES:
            continue
        if isinstance(value, dict) and key not in NAMED:
            yield (key,), value
        elif isinstance(value, dict | list):
            several = value.items() if isinstance(value, dict) else enumerate(value)
            yield from (((key, str(name)), part) for name, part in several if isinstance(part, dict))


def without_patterns(schema: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return a schema that is looser by some regular expressions: properties that one names may be anything."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str) and value in left_out:
            continue
        if key in VALUES:
            found[key] = value
        elif isinstance(value, dict) and key in NAMED:
            names = [name for name in value if key != "patternProperties" or name not in left_out]
            found[key] = {name: _part(value[name], left_out) for name in names}
        elif isinstance(value, list):
            found[key] = [_part(part, left_out) for part in value]
        else:
            found[key] = _part(value, left_out)
    named = schema.get("patternProperties")
    if isinstance(named, dict) and any(name in left_out for name in named):
        found.pop("additionalProperties", None)  # which would forbid them
    return found


def _part(value: Any, left_out: Collection[str]) -> Any:
    return without_patterns(value, left_out) if isinstance(value, dict) else value

"""Regular expressions in JSON schemas: found wherever schemas stand, and left out alone."""

from __future__ import annotations

from typing import Any

from warmkv.platform.gateway.apis.schema_patterns import patterns, without_patterns

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "pattern": "a"},  # a property that is called so
        "default": {"items": {"pattern": "b"}, "default": {"pattern": "no schema"}},
        "either": {"anyOf": [{"pattern": "c"}, {"enum": [{"pattern": "no schema"}]}, True]},
    },
    "patternProperties": {"d": {"pattern": "a"}, "e": {}},
    "additionalProperties": False,
    "$defs": {"one": {"const": {"pattern": "no schema"}, "pattern": "f"}},
    "pattern": 3,
}


def test_patterns_are_found_with_their_places():
    assert dict(patterns(SCHEMA)) == {
        "properties.pattern.pattern": "a",
        "properties.default.items.pattern": "b",
        "properties.either.anyOf.0.pattern": "c",
        "patternProperties": "e",  # the last of two
        "patternProperties.d.pattern": "a",
        "$defs.one.pattern": "f",
    }
    assert [pattern for place, pattern in patterns(SCHEMA) if place == "patternProperties"] == ["d", "e"]


def test_a_schema_without_some_of_them_is_looser_and_else_the_same():
    left = without_patterns(SCHEMA, {"a", "d", "no schema"})
    assert left == {
        **{name: value for name, value in SCHEMA.items() if name != "additionalProperties"},
        "properties": {**SCHEMA["properties"], "pattern": {"type": "string"}},
        "patternProperties": {"e": {}},
    }
    assert without_patterns(SCHEMA, set()) == SCHEMA
    assert without_patterns(SCHEMA, {"a"})["additionalProperties"] is False

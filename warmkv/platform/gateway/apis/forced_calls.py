"""Answers that must call tools: the family's format of calls around the JSON schemas of the tools, as a constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from warmkv.platform.gateway.apis.chat_parsing.families import CallSyntax
from warmkv.platform.gateway.apis.structured import schema_text, thinking_rules
from warmkv.replicas.protocol import Constraint


def constraint_for_tools(
    syntax: CallSyntax,
    tools: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    parallel: bool,
    begun: str = "",
    thinking: tuple[str, str] | None = None,
) -> Constraint:
    """Return the constraint of an answer that is nothing but calls of tools.

    `tools` are as chat templates take them. `special` are the ids of special tokens, which no text of a grammar
    matches. Parts of a schema that cannot be held to are left out: without `strict` a schema is what a tool wants, not
    what it is promised.
    """
    calls = []
    for tool in tools:
        function = tool["function"]
        before, behind = (
            _literal(part.replace("{name}", function["name"]), special) for part in (syntax.before, syntax.behind)
        )
        schema = schema_text({"type": "object", **function["parameters"]}, lenient=True)
        calls.append(" ".join(filter(None, (before, f"%json {schema}", behind))))
    more = f" ({_literal(syntax.between, special)} call)*" if parallel and syntax.between else ""
    first, rules = thinking_rules(begun, thinking)
    named = [f"call{number}: {call}" for number, call in enumerate(calls)]
    start = f"start: {first}{_literal(syntax.first, special)} call{more} {_literal(syntax.last, special)}"
    one_of = "call: " + " | ".join(f"call{number}" for number in range(len(calls)))
    return Constraint("grammar", "\n".join([start, one_of, *named, *rules]))


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Return a text as a grammar has it, special tokens by their ids."""
    if not text:
        return ""
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text) if special else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)

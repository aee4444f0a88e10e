"""Answers with calls of tools, as constraints: the family's form of calls around the JSON schemas of the tools.

Calls are forced, or may stand where the model writes them: in text, or in place of an answer of another form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmkv.platform.gateway.apis.chat_parsing.families import CallSyntax
from warmkv.platform.gateway.apis.structured import (
    answer_body,
    literal,
    schema_text,
    slashes_escaped,
    thinking_is_open,
    thinking_rules,
    thoughts_rules,
)
from warmkv.replicas.protocol import Constraint

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How answers to a request call its tools, which are as chat templates take them.

    Arguments of the tools named in `strict` satisfy their schema as a whole. Calls are limited to the tools named in
    `allowed`, unless that is None. `special` are the ids of special tokens,
    which no text of a grammar matches. `begun` is the end of the prompt, `thinking` what opens and closes thinking,
    which is free.
    """

    syntax: CallSyntax
    tools: Sequence[Mapping[str, Any]]
    special: Mapping[str, int]
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    begun: str = ""
    thinking: tuple[str, str] | None = None

    def forced(self) -> Constraint:
        """Return the constraint of an answer that is nothing but calls.

        Parts of a schema that cannot be held to are left out, unless its tool is strict: else a schema is what a tool
        wants, not what it is promised.
        """
        first, rules = thinking_rules(self.begun, self.thinking, self.special)
        calls = self._calls(self.syntax.first, self.syntax.before, lenient=True)
        return _grammar(f"start: {first}calls", calls, rules)

    def beside_text(self) -> Constraint:
        """Return the constraint of an answer of text in which calls may stand. Without `strict` they take any object.

        Where nothing announces calls within text they are the whole answer.
        """
        syntax = self.syntax
        if syntax.notes:
            notes = " | ".join(self._literal(note) for note in syntax.notes)
            start = f"start: (note {self._literal(syntax.next_note)})* (note | calls)"
            return _grammar(start, self._calls("", syntax.before), [f"note: ({notes}) TEXT?", "TEXT: /(.|\\n)+/"])
        names = "|".join(re.escape(tool["function"]["name"]) for tool in self.tools)
        no_text = [syntax.not_text.replace("{names}", names)]
        first, again, rules = "", "", list[str]()
        if self.thinking is not None:
            opening, closing = self.thinking
            first = "thoughts " if thinking_is_open(self.begun, self.thinking) else ""
            again = "again* "
            rules = [
                "again: rethought thoughts",
                *self._announced("rethought", opening),
                *thoughts_rules(closing, self.special),
            ]
            no_text.append(f"(?s:.*){re.escape(opening)}(?s:.*)")
        forbidden = " | ".join(f"/{slashes_escaped(one)}/" for one in no_text)
        rules.append(f"TEXT: /(?s:.+)/ & ~({forbidden})")
        if not (sign := syntax.sign):
            return _grammar(f"start: {first}{again}(calls | TEXT)", self._calls("", syntax.before), rules)
        rules += self._announced("announced", sign)
        if syntax.first:  # calls are one list, behind which nothing follows
            start = f"start: {first}{again}(announced calls | TEXT)"
            return _grammar(start, self._calls(syntax.first.removeprefix(sign), syntax.before), rules)
        start = f"start: {first}{again}(announced calls {again})* TEXT?"
        return _grammar(start, self._calls("", syntax.before.removeprefix(sign), alone=True), rules)

    def beside_format(self, constraint: Constraint) -> Constraint:
        """Return the constraint of an answer that is calls, or else satisfies a constraint of its own."""
        first, rules = thinking_rules(self.begun, self.thinking, self.special)
        answer = f"answer: {answer_body(constraint)}"
        return _grammar(
            f"start: {first}(calls | answer)", self._calls(self.syntax.first, self.syntax.before), [answer, *rules]
        )

    def _calls(self, first: str, before: str, *, lenient: bool = False, alone: bool = False) -> list[str]:
        """Return the rules of `calls`, with these texts in place of the syntax's own; one call where it is `alone`."""
        syntax, calls = self.syntax, list[str]()
        for tool in self.tools:
            function = tool["function"]
            is_strict, name = function["name"] in self.strict, function["name"]
            if self.allowed is not None and name not in self.allowed:
                continue
            arguments = "any"
            if is_strict or lenient:
                schema = {**ANY_OBJECT, **function["parameters"]}
                arguments = f"%json {schema_text(schema, lenient=not is_strict)}"
            begun, ended = (self._literal(part.replace("{name}", name)) for part in (before, syntax.behind))
            calls.append(" ".join(filter(None, (begun, arguments, ended))))
        many = self.parallel and syntax.between and not alone
        more = f" ({self._literal(syntax.between)} call)*" if many else ""
        return [
            f"calls: {self._literal(first)} call{more} {self._literal(syntax.last)}",
            "call: " + " | ".join(f"call{number}" for number in range(len(calls))),
            *(f"call{number}: {call}" for number, call in enumerate(calls)),
            f"any: %json {schema_text(ANY_OBJECT)}",
        ]

    def _announced(self, rule: str, sign: str) -> list[str]:
        """Return the rules of text up to a sign and with it."""
        if sign in self.special:
            return [f"{rule}: TEXT? {self._literal(sign)}"]
        return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: TEXT? {json.dumps(sign)}"]

    def _literal(self, text: str) -> str:
        return literal(text, self.special)


def _grammar(start: str, *rules: Sequence[str]) -> Constraint:
    return Constraint("grammar", "\n".join([start, *(rule for some in rules for rule in some)]))

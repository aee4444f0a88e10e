"""Constrained answers: the fields by which the APIs, and vLLM, ask for them, and the constraint that they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.schema import Body, Items
from warmkv.replicas.constraints.compiler import WHITESPACE
from warmkv.replicas.protocol import Constraint, ConstraintKind

Schema = dict[str, Any] | str  # a text is JSON
Choices = Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A constraint, and the field that asks for it."""

    place: str
    constraint: Constraint

    @classmethod
    def of(cls, place: str, kind: ConstraintKind, value: Schema | Sequence[str]) -> Wanted:
        return cls(place, Constraint(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class Aliased(Body):
    """A body with names that pydantic's models have for themselves; what is not declared changes nothing."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class NamedSchema(Aliased):
    """A JSON schema of OpenAI's API. The answer keeps to it, `strict` or not."""

    json_schema: dict[str, Any] = Field(alias="schema")


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class OutputFormat(Aliased):
    """Format of an answer in the Messages API."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")

    def wanted(self, place: str) -> Wanted:
        """Return the constraint that it is, of the field in this place."""
        return Wanted.of(f"{place}.schema", "json_schema", self.json_schema)


class StructuredOutputs(Aliased):
    """What vLLM has under `structured_outputs`; one of them."""

    structural_tag: None = None
    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(Body):
    """The fields of OpenAI's API and of vLLM, whose older names begin with `guided_`."""

    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def wanted(self) -> Wanted | None:
        """Return the constraint of the answer. Raises ApiError (400) where there are two."""
        found: list[Wanted] = []
        chosen, outputs = self.response_format, self.structured_outputs or StructuredOutputs()
        if isinstance(chosen, JsonSchemaFormat):
            found.append(Wanted.of("response_format.json_schema.schema", "json_schema", chosen.json_schema.json_schema))
        elif isinstance(chosen, JsonObjectFormat):
            found.append(Wanted.of("response_format", "json_object", ""))
        if outputs.json_object:
            found.append(Wanted.of("structured_outputs.json_object", "json_object", ""))
        named: list[tuple[ConstraintKind, str, Any, Any]] = [
            ("json_schema", "json", outputs.json_, self.guided_json),
            ("regex", "regex", outputs.regex, self.guided_regex),
            ("choice", "choice", outputs.choice, self.guided_choice),
            ("grammar", "grammar", outputs.grammar, self.guided_grammar),
        ]
        for kind, name, new, old in named:
            for place, value in ((f"structured_outputs.{name}", new), (f"guided_{name}", old)):
                if value is not None:
                    found.append(Wanted.of(place, kind, value))
        if len(found) > 1:
            raise invalid(f"{found[1].place}: the answer is constrained by {found[0].place} already")
        return found[0] if found else None


def behind_thinking(
    constraint: Constraint, begun: str, thinking: tuple[str, str], special: Mapping[str, int]
) -> Constraint:
    """Return the constraint of an answer whose thinking is free: it holds behind what closes it.

    `begun` is the end of the prompt, `thinking` what opens and closes it, `special` are the ids of special tokens. A
    grammar stays as it is.
    """
    first, rules = thinking_rules(begun, thinking, special)
    if constraint.kind == "grammar" or not first:
        return constraint
    return Constraint("grammar", "\n".join([f"start: {first}answer", f"answer: {answer_body(constraint)}", *rules]))


def answer_body(constraint: Constraint) -> str:
    """Return a constraint, which is no grammar, as the body of a rule."""
    if constraint.kind in ("json_schema", "json_object"):
        schema = json.loads(constraint.text) if constraint.kind == "json_schema" else {"type": "object"}
        return f"%json {schema_text(schema)}"
    if constraint.kind == "choice":
        return " | ".join(map(json.dumps, json.loads(constraint.text)))
    return f"/{slashes_escaped(constraint.text)}/"


def slashes_escaped(pattern: str) -> str:
    """Return a regular expression as it stands between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def thinking_is_open(begun: str, thinking: tuple[str, str]) -> bool:
    """Return True where a prompt that ends so has opened thinking."""
    opening, closing = thinking
    return opening in begun.rpartition(closing)[2]


def thinking_rules(begun: str, thinking: tuple[str, str] | None, special: Mapping[str, int]) -> tuple[str, list[str]]:
    """Return what stands before an answer in its grammar, and the rules for it.

    Where the prompt opens thinking it must be closed first; where it closes it there is none; else it may come first.
    """
    if thinking is None:
        return "", []
    opening, closing = thinking
    is_open = thinking_is_open(begun, thinking)
    if closing in begun and not is_open:
        return "", []
    before = "" if is_open else f"{literal(opening, special)} "
    rules = [f"thinking: {before}thoughts /\\s*/", *thoughts_rules(closing, special)]
    return ("thinking " if is_open else "thinking? "), rules


def thoughts_rules(closing: str, special: Mapping[str, int]) -> list[str]:
    """Return the rules of thinking up to what closes it and with it."""
    if closing in special:
        return [f"thoughts: /(.|\\n)*/ {literal(closing, special)}"]
    return [f"thoughts[suffix={json.dumps(closing)}]: /(.|\\n)*/"]


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return a text as a grammar has it, special tokens by their ids."""
    if not text:
        return ""
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text) if special else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def schema_text(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """Return a JSON schema as it stands within a grammar; a lenient one without what cannot be held to."""
    options = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": lenient}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)

"""Constrained answers through both APIs, by every field that asks for one, and what is refused with its place."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.unit.replicas.constraints.conftest import EOS, TOKENIZER, ids
from warmkv.platform.gateway.apis.structured import behind_thinking
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.protocol import Constraint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
GBNF = 'root ::= ("a" | "b") "-" [0-9] [0-9]'
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}}, ""),
    ({"extra_body": {"guided_json": SCHEMA}}, ""),
    ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, ""),
    ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, ""),
    ({"extra_body": {"guided_regex": "[xy]{2}/z"}}, "[xy]{2}/z"),
    ({"extra_body": {"guided_choice": ["yes", "no"]}}, "yes|no"),
    ({"extra_body": {"guided_grammar": GBNF}}, r"[ab]-\d\d"),
    ({"extra_body": {"structured_outputs": {"regex": "[0-9]{3}"}}}, "[0-9]{3}"),
]


def chat(server: Any, **options: Any) -> Any:
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 1, "model": server.config.model.name, **options}
    return server.openai().chat.completions.create(messages=[{"role": "user", "content": "def main():"}], **options)


@pytest.mark.parametrize(("fields", "pattern"), FIELDS, ids=lambda value: str(value)[:50])
def test_every_field_constrains_the_answer_whole_and_streamed(server, fields, pattern):
    choice = chat(server, **fields).choices[0]
    assert choice.finish_reason == "stop"
    if pattern:
        assert re.fullmatch(pattern, choice.message.content)
    else:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    streamed = chat(server, stream=True, **fields)
    assert "".join(part.choices[0].delta.content or "" for part in streamed) == choice.message.content


def test_completions_and_the_messages_api_as_well(server):
    client, name = server.openai(), server.config.model.name
    plain = client.completions.create(
        model=name, prompt="x", max_tokens=9, extra_body={"guided_choice": ["ja", "nein"]}
    )
    assert plain.choices[0].text in ("ja", "nein")
    answer = server.anthropic().messages.create(
        model=name,
        max_tokens=60,
        messages=[{"role": "user", "content": "def main():"}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        extra_body={"warmkv": {"seed": 1}},  # or whitespace may be longer than the answer
    )
    assert answer.stop_reason == "end_turn"
    jsonschema.validate(json.loads(answer.content[0].text), SCHEMA)


def test_any_json_object_may_be_cut_by_max_tokens(server):
    choice = chat(server, response_format={"type": "json_object"}, max_tokens=3).choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason in ("length", "stop")


@pytest.mark.parametrize("after", [1, 6])
def test_an_answer_whose_replica_dies_goes_on_within_its_constraint(server, after):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
    whole = chat(server, **fields).choices[0].message.content
    server.faults.append(after)
    assert chat(server, **fields).choices[0].message.content == whole
    assert server.faults == []


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "text"}}}},
            "response_format.json_schema.schema: ",
        ),
        ({"extra_body": {"guided_json": "{"}}, "guided_json: "),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex: "),
        ({"extra_body": {"guided_choice": []}}, "guided_choice: "),
        ({"extra_body": {"structured_outputs": {"grammar": "what?"}}}, "structured_outputs.grammar: neither Lark"),
        ({"extra_body": {"guided_regex": "a" * 200_000}}, "guided_regex: 200000 characters are more than 131072"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
            "guided_regex: the answer is constrained by response_format already",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_compiled_is_refused_with_its_place_and_nothing_is_sent(server, fields, place):
    sent = len(server.requests)
    with pytest.raises(openai.BadRequestError, match=re.escape(place)):
        chat(server, **fields)
    assert len(server.requests) == sent


def test_the_messages_api_refuses_with_the_place(server):
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.format.schema: .*not"):
        server.anthropic().messages.create(
            model=server.config.model.name,
            max_tokens=9,
            messages=[{"role": "user", "content": "x"}],
            output_config={"format": {"type": "json_schema", "schema": {"not": {"type": "null"}}}},
        )


@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        (Constraint("json_object"), "{}"),
        (Constraint("json_schema", json.dumps(SCHEMA)), '{"ok": true, "n": 3}'),
        (Constraint("regex", r"a/b\/c"), "a/b/c"),
        (Constraint("choice", '["x", "y"]'), "y"),
    ],
)
def test_thinking_is_free_and_the_answer_behind_it_is_not(constraint, answer):
    compiler = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[EOS])

    def allowed(begun: str, said: str) -> bool:
        matcher = compiler.matcher(behind_thinking(constraint, begun, ("<think>", "</think>"), {}))
        return all(map(matcher.consume_token, [*ids(said), EOS]))

    thought = "if a < b:\n  </thin>"
    for begun, opening, free in (("assistant\n", "<think>", True), ("<think>\n", "", False)):
        assert allowed(begun, f"{opening}{thought}</think>\n\n{answer}")
        assert not allowed(begun, f"{opening}{thought}</think>so {answer}")
        assert allowed(begun, answer) == free
    assert allowed("<think>\n\n</think>\n\n", answer)
    assert not allowed("<think>\n\n</think>\n\n", f"<think>{thought}</think>{answer}")

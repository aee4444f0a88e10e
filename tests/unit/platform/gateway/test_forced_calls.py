"""Answers that must call a tool, through both APIs, and the forms of calls of every family that can be forced."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.unit.replicas.constraints.conftest import EOS, TOKENIZER, ids
from warmkv.platform.gateway.apis.chat_parsing.families import FAMILIES
from warmkv.platform.gateway.apis.forced_calls import constraint_for_tools
from warmkv.replicas.constraints.compiler import Compiler

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
NAMES = ("look", "find")
OPENAI = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
MESSAGES: Any = [{"name": name, "input_schema": SCHEMA} for name in NAMES]


def chat(server: Any, **options: Any) -> Any:
    options = {"max_tokens": 90, "temperature": 1.0, "seed": 1, "tools": OPENAI, **options}
    said: Any = [{"role": "user", "content": "hello"}]
    return server.openai().chat.completions.create(messages=said, model=server.config.model.name, **options)


def message(server: Any, choice: Any, tools: Any = MESSAGES, tokens: int = 90) -> Any:
    said: Any = [{"role": "user", "content": "hello"}]
    return server.anthropic().messages.create(
        model=server.config.model.name, max_tokens=tokens, messages=said, tools=tools, tool_choice=choice
    )


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", NAMES), ({"type": "function", "function": {"name": "find"}}, ("find",))],
)
def test_a_call_can_be_forced_in_the_openai_api(server, choice, names):
    answer = chat(server, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any", "disable_parallel_tool_use": True}, NAMES), ({"type": "tool", "name": "look"}, ("look",))],
)
def test_a_call_can_be_forced_in_the_messages_api(server, choice, names):
    answer = message(server, choice)
    assert answer.stop_reason == "tool_use"
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert call.name in names
    jsonschema.validate(call.input, SCHEMA)


def test_what_cannot_be_forced_is_refused_with_its_place(server):
    with pytest.raises(anthropic.BadRequestError, match="tool_choice: there is no tool 'absent'"):
        message(server, {"type": "tool", "name": "absent"})
    with pytest.raises(openai.BadRequestError, match="tool_choice: there is no tool 'absent'"):
        chat(server, tool_choice={"type": "function", "function": {"name": "absent"}})
    with pytest.raises(openai.BadRequestError, match="constrained by response_format already"):
        chat(server, tool_choice="required", response_format={"type": "json_object"})
    broken = [
        *MESSAGES,
        {"name": "bad", "input_schema": {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}},
    ]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.2: .*b"):
        message(server, {"type": "any"}, tools=broken)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.forced is not None])
@pytest.mark.parametrize("parallel", [False, True])
def test_the_form_of_calls_is_that_of_the_family(family, parallel):
    syntax = FAMILIES[family].forced
    assert syntax is not None
    constraint = constraint_for_tools(syntax, OPENAI, {}, parallel=parallel)
    compiler = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[EOS])

    def consumed(said: str) -> bool:
        matcher = compiler.matcher(constraint)
        return all(map(matcher.consume_token, [*ids(said), EOS]))

    def written(*names: str, arguments: str = '{"n": 3, "ok": true}') -> str:
        calls = (syntax.before.replace("{name}", name) + arguments + syntax.behind for name in names)
        return syntax.first + syntax.between.join(calls) + syntax.last

    assert consumed(written("look"))
    assert consumed(written("find"))
    assert consumed(written("look", "find")) == (parallel and bool(syntax.between))
    assert not consumed(written("absent"))
    assert not consumed(written("look", arguments='{"n": 100, "ok": true}'))
    assert not consumed("hello")


def test_special_tokens_are_drawn_as_such():
    """A text of a grammar never matches a special token, so that one is named by its id."""
    syntax = FAMILIES["hermes"].forced
    assert syntax is not None
    compiler = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[])
    constraint = constraint_for_tools(syntax, OPENAI, {"<tool_call>": EOS}, parallel=False)
    matcher = compiler.matcher(constraint)
    assert all(map(matcher.consume_token, [EOS, *ids('\n{"name": "look"')]))

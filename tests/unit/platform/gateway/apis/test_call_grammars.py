"""Answers that must call a tool, or call strict ones, through the APIs; and the forms of calls of every family."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import anthropic
import jsonschema
import numpy as np
import openai
import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from tests.unit.replicas.constraints.conftest import EOS, TOKENIZER, ids, text
from warmkv.platform.gateway.apis.call_grammars import CallGrammar
from warmkv.platform.gateway.apis.chat_parsing.families import FAMILIES
from warmkv.platform.gateway.apis.chat_parsing.parser import PartParser
from warmkv.platform.gateway.apis.chat_parsing.parts import ToolCall
from warmkv.platform.gateway.intake import constraining
from warmkv.replicas.constraints import compiler
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.protocol import Constraint

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


def message(server: Any, choice: Any, tools: Any = MESSAGES, tokens: int = 90, **options: Any) -> Any:
    said: Any = [{"role": "user", "content": "hello"}]
    options = {"extra_body": {"warmkv": {"seed": 1}}, **options}  # or a text may be longer than the answer
    return server.anthropic().messages.create(
        model=server.config.model.name, max_tokens=tokens, messages=said, tools=tools, tool_choice=choice, **options
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


def test_a_forced_call_comes_in_place_of_the_text_that_a_format_is_of(server):
    json_object = {"type": "json_object"}
    asked = chat(server, tool_choice="required", parallel_tool_calls=False, response_format=json_object)
    assert asked.choices[0].finish_reason == "tool_calls"
    one = {"type": "any", "disable_parallel_tool_use": True}
    answer = message(server, one, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert answer.stop_reason == "tool_use"


def test_what_cannot_be_forced_is_refused_with_its_place(server):
    with pytest.raises(anthropic.BadRequestError, match="tool_choice: there is no tool 'absent'"):
        message(server, {"type": "tool", "name": "absent"})
    with pytest.raises(openai.BadRequestError, match="tool_choice: there is no tool 'absent'"):
        chat(server, tool_choice={"type": "function", "function": {"name": "absent"}})
    broken_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/b"}}}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat(server, tool_choice="required", response_format=broken_format)
    broken = [
        *MESSAGES,
        {"name": "bad", "input_schema": {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}},
    ]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.2: .*b"):
        message(server, {"type": "any"}, tools=broken)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.calls is not None])
@pytest.mark.parametrize("parallel", [False, True])
def test_the_form_of_calls_is_that_of_the_family(family, parallel):
    syntax = FAMILIES[family].calls
    assert syntax is not None
    constraint = CallGrammar(syntax, OPENAI, {}, parallel).forced()
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
    syntax = FAMILIES["hermes"].calls
    assert syntax is not None
    compiler = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[])
    constraint = CallGrammar(syntax, OPENAI, {"<tool_call>": EOS}, parallel=False).forced()
    matcher = compiler.matcher(constraint)
    assert all(map(matcher.consume_token, [EOS, *ids('\n{"name": "look"')]))


COMPILER = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[EOS])
VALID, INVALID = '{"n": 3, "ok": true}', '{"n": 100, "ok": true}'
FORMS = [name for name, family in FAMILIES.items() if family.calls is not None]


def takes(constraint: Any, said: str) -> bool:
    matcher = COMPILER.matcher(constraint)
    return all(map(matcher.consume_token, [*ids(said), EOS]))


def in_text(family: str, said: str) -> str:
    """Return a text as an answer of the family has it."""
    syntax = FAMILIES[family].calls
    return (syntax.notes[0] if syntax.notes else "") + said


def called(family: str, name: str, arguments: str) -> str:
    syntax = FAMILIES[family].calls
    return syntax.first + syntax.before.replace("{name}", name) + arguments + syntax.behind + syntax.last


@pytest.mark.parametrize("family", FORMS)
def test_strict_calls_satisfy_their_schema_wherever_they_stand(family):
    """`look` is strict, `find` is not."""
    syntax = FAMILIES[family].calls
    grammar = CallGrammar(syntax, OPENAI, {}, strict=frozenset(["look"])).beside_text()
    assert takes(grammar, in_text(family, "Hello {, <tool and `code`"))
    for before in ["", *(["Let me see. "] if syntax.sign else [])]:
        assert takes(grammar, before + called(family, "look", VALID))
        assert not takes(grammar, before + called(family, "look", INVALID))
        assert not takes(grammar, before + called(family, "look", "{}"))
        assert takes(grammar, before + called(family, "find", INVALID))
        assert takes(grammar, before + called(family, "find", "{}"))
        assert not takes(grammar, before + called(family, "find", "{3"))
        if family != "glm4":  # of which that is text
            assert not takes(grammar, before + called(family, "absent", VALID))
    if syntax.sign and not syntax.first:
        several = "a " + called(family, "look", VALID) + "\n" + called(family, "find", "{}") + " b"
        assert takes(grammar, several)
        assert not takes(grammar, several.replace("{}", "{}" + syntax.behind + called(family, "look", INVALID)))


@pytest.mark.parametrize("family", FORMS)
def test_whatever_is_drawn_beside_strict_tools_has_no_other_calls(family):
    """Random answers under the mask, which often go on as a call would: each is read as the service reads it."""
    syntax = FAMILIES[family].calls
    grammar = CallGrammar(syntax, OPENAI, {}, strict=frozenset(NAMES)).beside_text()
    template = load_response_template(dict(FAMILIES[family].template))
    scripts = [called(family, name, arguments) for name in NAMES for arguments in (VALID, INVALID)]
    scripts += ['{"name": "look", "parameters": {}}', "```json\n" + '{"name": "look"}\n```', "look\n{}", "x}; "]
    count, ended = 0, 0
    for seed in range(40):
        draws, matcher, drawn, script = random.Random(f"{family}/{seed}"), COMPILER.matcher(grammar), list[int](), ""
        while len(drawn) < 300 and EOS not in drawn and not matcher.is_stopped():
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            tokens = np.flatnonzero(allowed).tolist()
            script = script or draws.choice(scripts)
            (wanted,) = ids(script[0])
            script = script[1:]
            if EOS in tokens and draws.random() < 0.02:
                wanted = EOS
            elif wanted not in tokens or draws.random() < 0.02:
                wanted = draws.choice(tokens)
            assert matcher.consume_token(wanted)
            drawn.append(wanted)
        if EOS not in drawn and not matcher.is_stopped():
            continue
        ended += 1
        parser = PartParser(template, "", OPENAI, set(NAMES) if FAMILIES[family].undelimited else None)
        for part in parser.feed(text(drawn)) + parser.finish(complete=True):
            if isinstance(part, ToolCall):
                count += 1
                assert part.name in NAMES, text(drawn)
                jsonschema.validate(json.loads(part.arguments), SCHEMA)
    assert ended > 10
    assert count > 5


def test_thinking_beside_strict_tools_is_free():
    syntax = FAMILIES["hermes"].calls
    tags, strict = ("<think>", "</think>"), frozenset(NAMES)
    good, bad = called("hermes", "look", VALID), called("hermes", "look", INVALID)
    for begun, first in (("", "<think>"), ("<think>\n", ""), ("<think>\n\n</think>\n\n", "<think>")):
        grammar = CallGrammar(syntax, OPENAI, {}, strict=strict, begun=begun, thinking=tags).beside_text()
        assert takes(grammar, f"{first}a {bad} b</think>{good}")
        assert takes(grammar, f"{first}a</think>Yes <think>{bad}</think> and {good}<think>c</think>!")
        assert not takes(grammar, f"{first}a</think>Yes {bad}")
        assert not takes(grammar, f"{first}a")
    special = CallGrammar(syntax, OPENAI, {"<tool_call>": EOS}, strict=strict, thinking=tags).beside_text()
    matcher = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=ids("~")).matcher(special)
    assert all(map(matcher.consume_token, [*ids("a <think>b</think> c"), EOS, *ids(good.removeprefix("<tool_call>"))]))


def test_an_answer_of_a_form_may_be_calls_instead():
    grammar = CallGrammar(FAMILIES["hermes"].calls, OPENAI, {}, strict=frozenset(["look"]))
    mixed = grammar.beside_format(Constraint("choice", '["yes", "no"]'))
    good = called("hermes", "look", VALID)
    assert takes(mixed, "yes")
    assert takes(mixed, f"{good}\n{good}")
    assert not takes(mixed, called("hermes", "look", INVALID))
    assert not takes(mixed, f"yes{good}")
    assert not takes(mixed, "perhaps")


def test_strict_tools_mean_the_same_in_all_apis(server):
    tools = [{"type": "function", "function": {**one["function"], "strict": True}} for one in OPENAI]
    flat = [{"type": "function", "strict": True, **one["function"]} for one in OPENAI]
    chat(server, tools=tools, max_tokens=9)
    assert list(chat(server, tools=tools, max_tokens=9, stream=True))
    message(server, {"type": "auto"}, tools=[{**tool, "strict": True} for tool in MESSAGES], tokens=5)
    server.openai().responses.create(model=server.config.model.name, input="hello", tools=flat, max_output_tokens=5)
    constraints = {request.sampling.constraint for request in server.requests[-4:]}
    names = frozenset(NAMES)
    assert constraints == {CallGrammar(FAMILIES["hermes"].calls, OPENAI, {}, strict=names).beside_text()}
    prompts = {request.token_ids for request in server.requests[-4:-2]}
    chat(server, max_tokens=1)
    assert prompts == {server.requests[-1].token_ids}  # what the model is shown is the same


def test_strict_tools_that_cannot_be_held_to_are_refused_with_their_place(server):
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [MESSAGES[0], {"name": "bad", "input_schema": bad, "strict": True}]
    before = len(server.requests)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.1: "):
        message(server, {"type": "auto"}, tools=tools)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.1: "):
        message(server, {"type": "any"}, tools=tools)
    assert len(server.requests) == before
    message(server, {"type": "auto"}, tools=[{**tool, "strict": None} for tool in tools], tokens=2)
    assert server.requests[-1].sampling.constraint is None


@pytest.mark.parametrize("family", ["qwen3_coder", "glm4_moe"])
def test_families_whose_arguments_are_no_json_have_no_strict_tools(serve, family):
    server = serve("engine.threads=1", f"model.response_template={family}")
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0: this model's calls cannot be constrained"):
        message(server, {"type": "auto"}, tools=[{**tool, "strict": True} for tool in MESSAGES])


def test_a_form_beside_more_tools_than_a_grammar_holds_is_that_form_alone(server, monkeypatch):
    """Without strict tools, that is: those are what was asked for."""
    form = {"response_format": {"type": "json_object"}, "max_tokens": 2}
    chat(server, **form)
    assert "tool_call" in server.requests[-1].sampling.constraint.text
    monkeypatch.setattr(compiler, "LONGEST", 200)
    many = [{"type": "function", "function": {"name": f"tool_{n}"}} for n in range(9)]
    chat(server, tools=many, **form)
    assert server.requests[-1].sampling.constraint == Constraint("json_object")
    strict = [*many, {"type": "function", "function": {"name": "strict", "strict": True}}]
    with pytest.raises(
        openai.BadRequestError, match=r"tools\.9: strict tool 'strict': \d+ characters are more than 200"
    ):
        chat(server, tools=strict, **form)


UNHELD = [r"^(?!_).+$", r"\bfoo\b", r"(a)\1", "("]  # look-around, word boundaries, back-references, no pattern at all


def with_pattern(pattern: str, **more: Any) -> Any:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    return {"name": "bad", "input_schema": {**schema, "patternProperties": {pattern: {}}}, **more}


@pytest.mark.parametrize("pattern", UNHELD)
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}, {"type": "tool", "name": "bad"}])
def test_a_pattern_that_cannot_be_held_to_is_left_out(server, choice, pattern):
    """Of a tool that is not strict."""
    bad = with_pattern(pattern)
    assert message(server, choice, tools=[*MESSAGES, bad], tokens=2).usage.output_tokens == 2
    function = {"name": "bad", "parameters": bad["input_schema"]}
    tools = [*OPENAI, {"type": "function", "function": function}]
    assert chat(server, tools=tools, tool_choice="required", max_tokens=2).usage.completion_tokens == 2


def test_what_else_the_schema_of_such_a_tool_says_holds(server):
    answer = message(server, {"type": "tool", "name": "bad"}, tools=[*MESSAGES, with_pattern(UNHELD[0])])
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert isinstance(call.input["a"], str)


def test_patterns_that_can_be_held_to_stay_beside_others(server):
    good = {"type": "object", "properties": {"b": {"type": "string", "pattern": "^x{3}$"}}, "required": ["b"]}
    tools = [with_pattern(UNHELD[0]), {"name": "good", "input_schema": good}]
    answer = message(server, {"type": "tool", "name": "good"}, tools=tools)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert call.input["b"] == "xxx"
    forced = message(server, {"type": "any"}, tools=tools, tokens=5)
    assert forced.usage.output_tokens == 5
    text = server.requests[-1].sampling.constraint.text
    assert "x{3}" in text
    assert "(?!_)" not in text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "bad"}])
@pytest.mark.parametrize("pattern", UNHELD)
def test_a_strict_tool_with_such_a_pattern_is_refused_with_it(server, choice, pattern):
    sent, strict = len(server.requests), with_pattern(pattern, strict=True)
    del strict["input_schema"]["patternProperties"]
    with pytest.raises(anthropic.BadRequestError) as caught:
        message(server, choice, tools=[*MESSAGES, strict])
    told = caught.value.body["error"]["message"]
    assert told.startswith(f"tools.2: strict tool 'bad': properties.a.pattern: cannot be held to {pattern!r}: ")
    assert len(told) < 200
    assert "tool_call" not in told  # of the grammar
    assert len(server.requests) == sent


def test_another_tool_may_be_forced_beside_a_strict_one_that_is_not_possible(server):
    tools = [*MESSAGES, with_pattern(UNHELD[0], strict=True)]
    answer = message(server, {"type": "tool", "name": "look"}, tools=tools)
    assert [block.name for block in answer.content if block.type == "tool_use"] == ["look"]


def test_no_more_patterns_are_tried_than_a_few(server, monkeypatch):
    tried = []
    check = Compiler.check
    monkeypatch.setattr(Compiler, "check", lambda self, one: tried.append(one) or check(self, one))
    many = {f"p{n}": {"type": "string", "pattern": f"^(?!{n})"} for n in range(100)}
    tools = [{"name": "many", "input_schema": {"type": "object", "properties": many}}]
    assert message(server, {"type": "any"}, tools=tools, tokens=2).usage.output_tokens == 2
    assert len(tried) == constraining.MOST_PATTERNS


def test_a_fault_of_a_format_does_not_show_the_grammar_either(server):
    schema = with_pattern(UNHELD[0])["input_schema"]
    with pytest.raises(anthropic.BadRequestError) as caught:
        message(server, {"type": "auto"}, output_config={"format": {"type": "json_schema", "schema": schema}})
    told = caught.value.body["error"]["message"]
    assert told.startswith("output_config.format.schema: ")
    assert UNHELD[0] in told
    assert "x-guidance" not in told

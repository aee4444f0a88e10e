"""`allowed_tools`: the model is shown all tools, and its calls are limited to some of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.unit.platform.gateway.apis.test_call_grammars import FORMS, OPENAI, VALID, called, in_text
from tests.unit.replicas.constraints.conftest import EOS, TOKENIZER, ids
from warmkv.platform.gateway.apis.call_grammars import CallGrammar
from warmkv.platform.gateway.apis.chat_parsing.families import FAMILIES
from warmkv.replicas.constraints.compiler import Compiler

COMPILER = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[EOS])


def takes(constraint: Any, said: str) -> bool:
    return all(map(COMPILER.matcher(constraint).consume_token, [*ids(said), EOS]))


@pytest.mark.parametrize("family", FORMS)
def test_calls_are_limited_to_those_that_are_allowed(family):
    grammar = CallGrammar(FAMILIES[family].calls, OPENAI, {}, allowed=frozenset(("look",)))
    for constraint in (grammar.forced(), grammar.beside_text()):
        assert takes(constraint, called(family, "look", VALID))
        assert not takes(constraint, called(family, "find", VALID))
    assert takes(grammar.beside_text(), in_text(family, "Hello."))
    assert not takes(grammar.forced(), in_text(family, "Hello."))


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat(server: Any, **options: Any) -> Any:
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 1, "tools": OPENAI, **options}
    said: Any = [{"role": "user", "content": "hello"}]
    return server.openai().chat.completions.create(messages=said, model=server.config.model.name, **options)


def test_a_call_of_those_can_be_required(server):
    answer = chat(server, tool_choice=allowed("required", "find"), parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["find"]


def test_both_apis_limit_calls_alike_and_show_all_tools(server):
    chat(server, max_tokens=1)
    free = server.requests[-1]
    assert free.sampling.constraint is None
    chat(server, max_tokens=1, tool_choice=allowed("auto", "find"))
    limited = server.requests[-1]
    assert limited.token_ids == free.token_ids
    assert "find" in limited.sampling.constraint.text
    assert "look" not in limited.sampling.constraint.text
    flat = [{"type": "function", **tool["function"]} for tool in OPENAI]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "find"}]}
    server.openai().responses.create(
        model=server.config.model.name, input="hello", tools=flat, tool_choice=choice, max_output_tokens=1
    )
    assert server.requests[-1].sampling.constraint == limited.sampling.constraint
    assert server.requests[-1].token_ids == limited.token_ids


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (allowed("auto", "absent"), "tool_choice: there is no tool 'absent'"),
        (allowed("required"), "tool_choice.allowed_tools.tools: List should have at least 1 item"),
        (allowed("sometimes", "look"), "tool_choice.allowed_tools.mode: "),
    ],
)
def test_choices_that_are_none_are_refused(server, choice, told):
    with pytest.raises(openai.BadRequestError, match=told):
        chat(server, tool_choice=choice)


def test_families_whose_calls_cannot_be_constrained_refuse_it(serve):
    server = serve("engine.threads=1", "model.response_template=qwen3_coder")
    with pytest.raises(openai.BadRequestError, match="allowed_tools is not possible"):
        chat(server, tool_choice=allowed("auto", "look"))

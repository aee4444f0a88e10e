"""What the APIs have and this server has not is refused by name, in the terms of the API that was asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.platform.exchanges import Exchange, Gateway
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.apis.messages.requests import CountRequest, MessagesRequest
from warmkv.platform.gateway.apis.openai.requests import ChatRequest, CompletionRequest
from warmkv.platform.gateway.apis.responses.requests import ResponsesRequest
from warmkv.platform.gateway.apis.schema import Body, parse
from warmkv.platform.gateway.intake.body_limits import BodyLimits

MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"

TEXT_ONLY = "this server's model takes text only, no {}"
TOOL = {"name": "look", "input_schema": {"type": "object"}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
SCHEMA = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "look"}}
LEFT_OUT = {"type": "web_search", "external_web_access": False}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    return Gateway(tmp_path_factory.mktemp("refusing"))


def ask(gateway: Gateway, path: str, more: dict[str, Any]) -> Exchange:
    smallest: dict[str, dict[str, Any]] = {
        MESSAGES: {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]},
        COUNT: {"messages": [{"role": "user", "content": "hello"}]},
        CHAT: {"messages": [{"role": "user", "content": "hello"}]},
        COMPLETIONS: {"prompt": "hello"},
        RESPONSES: {"input": "hello"},
    }

    async def run() -> Exchange:
        before = gateway.admitted
        exchange = await Exchange(gateway, path, {"model": "tiny", **smallest[path], **more}).whole()
        assert exchange.status == 200 or gateway.admitted == before
        return exchange

    return asyncio.run(run())


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def items(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # content
    (
        CHAT,
        user({"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:,"}}),
        f"messages.0.content.1: {TEXT_ONLY.format('images')}",
    ),
    (CHAT, user({"type": "input_audio", "input_audio": {}}), f"messages.0.content.0: {TEXT_ONLY.format('audio')}"),
    (CHAT, user({"type": "file", "file": {"file_id": "x"}}), f"messages.0.content.0: {TEXT_ONLY.format('files')}"),
    (RESPONSES, items({"type": "input_image", "image_url": "x"}), f"input.0.content.0: {TEXT_ONLY.format('images')}"),
    (RESPONSES, items({"type": "input_file", "file_id": "x"}), f"input.0.content.0: {TEXT_ONLY.format('files')}"),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        f"input.0.output.0: {TEXT_ONLY.format('images')}",
    ),
    (
        MESSAGES,
        user({"type": "document", "source": PDF}),
        f"messages.0.content.0.source: {TEXT_ONLY.format('PDF documents')}",
    ),
    (
        MESSAGES,
        user({"type": "document", "source": {"type": "file", "file_id": "x"}}),
        f"messages.0.content.0.source: {TEXT_ONLY.format('files')}",
    ),
    (
        MESSAGES,
        user({"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}),
        "messages.0.content.0: citations: this server does not support it",
    ),
    (MESSAGES, user({"type": "image", "source": PDF}), f"messages.0.content.0: {TEXT_ONLY.format('images')}"),
    (
        MESSAGES,
        user({"type": "search_result", "content": []}),
        "messages.0.content.0: type 'search_result' is not supported here; this server takes 'text', 'document', "
        "'tool_result'",
    ),
    (
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input.0: type 'item_reference' is not supported here; this server takes 'message', 'reasoning', "
        "'function_call', 'function_call_output'",
    ),
    # tools
    *(
        (
            MESSAGES,
            {"tools": [TOOL, {"type": kind, "name": "x"}]},
            f"tools.1: {kind}: this server knows no such tool; describe it with a name and an input_schema",
        )
        for kind in ("bash_20250124", "text_editor_20250728", "memory_20250818", "computer_20250124")
    ),
    *(
        (
            MESSAGES,
            {"tools": [{"type": kind, "name": "x"}]},
            f"tools.0: {kind}: this server runs no tools; the client must run its own",
        )
        for kind in ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset")
    ),
    *(
        (path, {"tools": [{"type": kind}]}, f"tools.0: this server has no tools of type {kind!r}: describe it as a fu")
        for path, kind in (
            (CHAT, "custom"),
            (RESPONSES, "web_search"),
            (RESPONSES, "file_search"),
            (RESPONSES, "mcp"),
            (RESPONSES, "code_interpreter"),
        )
    ),
    (
        CHAT,
        {"tools": [NAMED], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
        "tool_choice: type 'custom' is not supported here; this server takes 'function', 'allowed_tools'",
    ),
    (
        RESPONSES,
        {"tools": [FUNCTION], "tool_choice": {"type": "web_search"}},
        "tool_choice: type 'web_search' is not supported here",
    ),
    (
        RESPONSES,
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice.tools.0.type: Input should be 'function'",
    ),
    (
        RESPONSES,
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION | {"name": "x"}]},
        },
        "tool_choice: there is no tool 'x'",
    ),
    *(
        (path, {"tools": tools, "tool_choice": "required"}, "tool_choice: there are no tools")
        for path, tools in ((CHAT, []), (RESPONSES, []), (RESPONSES, [LEFT_OUT]))
    ),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "look"}}, "tool_choice: there are no tools"),
    # fields
    (MESSAGES, {"compaction": {"instructions": "x"}}, "compaction: this server does not support it"),
    (COUNT, {"compaction": {"instructions": "x"}}, "compaction: this server does not support it"),
    (
        MESSAGES,
        {"output_format": SCHEMA, "output_config": {"format": {**SCHEMA, "schema": {"type": "object"}}}},
        "output_format: differs from output_config.format",
    ),
    (MESSAGES, {"output_format": {**SCHEMA, "schema": {"not": {}}}}, "output_format.schema: "),
    (COMPLETIONS, {"prompt": ""}, "prompt: an empty prompt has no tokens that an answer could follow"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt: an empty prompt has no tokens that an answer could follow"),
    (
        CHAT,
        {"n": 7, "max_tokens": 2000, "logprobs": True, "top_logprobs": 20},
        "logprobs: 294000 log-probabilities (of each token that all prompts and answers may have, and the most "
        "probable ones beside it) are more than 262144; ask for fewer prompts, answers",
    ),
    (COMPLETIONS, {"n": 128, "max_tokens": 2000, "logprobs": 1, "stream": True}, "logprobs: 512000 log-probabilities"),
    (
        COMPLETIONS,
        {"prompt": [[5] * 700] * 19, "max_tokens": 100, "echo": True, "logprobs": 19},
        "logprobs: 304000 log-probabilities",
    ),
    # terms of the Responses API, whose requests are checked as those of a chat
    (RESPONSES, {"reasoning": {"effort": "much"}}, "reasoning.effort: "),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema: Field required"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format.schema: Unimplemented keys",
    ),
    (RESPONSES, {"tools": [{"type": "function", "name": "no name"}]}, "tools.0.name: "),
    (RESPONSES, {"input": [{"role": "user", "content": []}]}, "input: a message needs content"),
    (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "[1]"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ]
        },
        "input: function_call.arguments: not a JSON object",
    ),
]


@pytest.mark.parametrize(("path", "more", "told"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused_by_name(gateway, path, more, told):
    refused = ask(gateway, path, more)
    assert refused.status == 400
    assert refused.error.startswith(told), refused.error
    if path in (CHAT, COMPLETIONS, RESPONSES):
        assert refused.json["error"]["param"] == told.partition(":")[0]


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
MARK = {"cache_control": {"type": "ephemeral"}}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("path", "more", "place"),
    [
        (MESSAGES, said(THOUGHT | MARK), "messages.0.content.0.cache_control"),
        (MESSAGES, said({"type": "thinking", "thinking": "hm"}), "messages.0.content.0.signature"),
        (MESSAGES, user({"type": "text", "text": "x", "cache_control": {}}), "messages.0.content.0.cache_control.type"),
        (MESSAGES, user({"type": "text"}), "messages.0.content.0.text"),
        (MESSAGES, user({"text": "x"}), "messages.0.content.0.type"),
        (MESSAGES, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (MESSAGES, user({"type": "document", "source": {"type": "text"}}), "messages.0.content.0.source.data"),
        (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        (CHAT, {"tools": [NAMED], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (CHAT, {"tools": [NAMED], "tool_choice": "always"}, "tool_choice"),
        (RESPONSES, {"input": [{"type": "message", "role": "user"}]}, "input.0.content"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "x", "call_id": "c"}]}, "input.0.arguments"),
        (COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt.1.0"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_place_is_that_in_the_body(gateway, path, more, place):
    """Whichever names of branches stand between, even where fields have the same."""
    refused = ask(gateway, path, more)
    assert refused.status == 400
    assert refused.error.startswith(f"{place}: "), refused.error


CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
SAID = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([SAID, CALL], "No tool output found for function call call_1."),
        ([SAID, CALL, SAID], "No tool output found for function call call_1."),
        ([CALL, CALL | {"call_id": "call_2"}, OUTPUT, SAID], "No tool output found for function call call_2."),
        ([SAID, OUTPUT], "No tool call found for function call output with call_id call_1."),
        ([CALL, OUTPUT, OUTPUT], "Two outputs found for function call call_1."),
    ],
)
def test_calls_and_outputs_that_do_not_fit_are_told_in_openais_words(gateway, said, told):
    refused = ask(gateway, RESPONSES, {"input": said})
    assert (refused.status, refused.error, refused.json["error"]["param"]) == (400, told, "input")


def test_calls_side_by_side_and_text_between_them_are_taken(gateway):
    other = CALL | {"call_id": "call_2"}
    text = {"role": "assistant", "content": "I look."}
    answered = [OUTPUT | {"call_id": "call_2"}, OUTPUT]
    assert ask(gateway, RESPONSES, {"input": [SAID, CALL, text, other, *answered, SAID]}).status == 200


def test_an_older_name_of_a_format_constrains_like_the_newer_one(tmp_path):
    asked = []

    class Asked(Gateway):
        def answer(self, attempt: Any) -> Any:
            asked.append(attempt.request.sampling.constraint)
            return super().answer(attempt)

    async def run() -> None:
        gateway = Asked(tmp_path)
        for more in (
            {"output_format": SCHEMA},
            {"output_config": {"format": SCHEMA}},
            {"output_format": SCHEMA, "output_config": {"format": SCHEMA}},
            {"output_format": None},
        ):
            body = {"model": "tiny", "max_tokens": 1, "messages": [SAID], **more}
            exchange = await Exchange(gateway, MESSAGES, body).whole()
            assert (exchange.status, "x-warmkv-ignored" in exchange.headers) == (200, False)

    asyncio.run(run())
    assert asked[0] is not None
    assert asked == [asked[0]] * 3 + [None]


def classes(of: type = Body) -> Iterator[str]:
    """The names of all bodies, and of their bases."""
    yield of.__name__
    for one in of.__subclasses__():
        yield from classes(one)


FIELDS = {"messages", "input", "tools", "tool_choice", "system", "prompt", "stop", "thinking", "text", "warmkv",
          "response_format", "stream_options", "context_management", "output_config", "cache_control", "logit_bias",
          "reasoning", "structured_outputs", "guided_choice", "metadata"}  # fmt: skip
WRONG: list[Any] = [
    3, "x", [], {}, [3], [[]], [{}], {"type": "x"}, {"type": 3}, {"type": "function"}, {"type": "allowed_tools"},
    [{"type": "function"}], [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [3]}],
    [{"role": "user", "content": [{}]}], [{"role": "user", "content": [{"type": "text"}]}], [{"role": 3}],
    [{"role": "user", "content": [{"type": "document", "source": {}}]}], [{"type": "custom", "input_schema": 3}],
    [{"role": "user", "content": [{"type": "tool_result", "content": [{}]}]}], {"edits": [{}]}, {"edits": 3},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "x"}}]}, {"format": {}}, {"format": 3},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": 3}, {"policy": 3}, {"choice": 3}, {"a": []},
]  # fmt: skip


def refusals(model: type[Body]) -> Iterator[tuple[dict[str, Any], ApiError]]:
    """What a body with something wrong in any field is refused with."""
    limits = BodyLimits(10**6, 10**6, 10**6, 10**6, 10**6)
    for field, value in itertools.product(sorted(FIELDS & model.model_fields.keys()), WRONG):
        body = {"model": "x", "messages": [SAID], "max_tokens": 1, "prompt": "x", "input": "x", field: value}
        try:
            parse(json.dumps(body).encode(), model, limits)
        except ApiError as error:
            yield body, error


@pytest.mark.parametrize("model", [MessagesRequest, CountRequest, ChatRequest, CompletionRequest, ResponsesRequest])
def test_no_refusal_names_a_class_of_ours_and_each_place_is_in_the_body(model):
    """Names of branches that pydantic puts into places are left out."""
    names = set(classes()) - {"Body", "Function", "Message", "Tool", "Text"}  # which are words, too
    found = list(refusals(model))
    assert len(found) > 30
    for body, error in found:
        assert not names & set(re.findall(r"\w+", error.message)), error.message
        place, _, message = error.message.partition(": ")
        assert not re.search(r"[\[(]|union|tagged|instance", place), error.message
        at: Any = body
        for part in [] if error.param is None else error.param.split("."):
            if "Field required" in message and part not in at:
                break
            at = at[int(part)] if isinstance(at, list) else at[part]

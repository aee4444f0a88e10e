"""Tool calls and thinking in answers of both APIs, whole and streamed, as the SDKs see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from tokenizers import AddedToken

from tests.unit.platform.exchanges import STARTED, Exchange, Gateway, chat, message
from warmkv.platform.gateway.apis.chat_parsing.format import ResponseFormat
from warmkv.platform.gateway.apis.thinking import restore, verify
from warmkv.platform.gateway.resume import Attempt
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.replicas.protocol import (
    Admitted,
    Constraint,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    ThinkingBudget,
)

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOL = {"name": "look_up", "description": "Finds a word.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "look_up", "description": "Finds a word.", "parameters": SCHEMA}}


def call(word: str) -> str:
    return f'<tool_call>\n{{"name": "look_up", "arguments": {{"word": "{word}"}}}}\n</tool_call>\n'


TWO_CALLS = f"I look.\n{call('a')}{call('b')}Wait."
THOUGHT = "<think>\nHm, a word.\n</think>\n\n"


class Scripted(Gateway):
    """A gateway before a replica that writes a text, three characters a token, and ends for a reason."""

    def __init__(
        self, folder: Path, text: str, reason: FinishReason = "end", *flags: str, others: list[Gateway] | None = None
    ) -> None:
        super().__init__(folder, "model.response_template=hermes", *flags, others=others)
        self.text, self.reason = text, reason
        self.requests: list[GenerateRequest] = []
        self.written = 0  # tokens

    async def answer(self, attempt: Attempt) -> AsyncGenerator[Event]:
        self.requests.append(attempt.request)
        yield Admitted()
        yield STARTED
        self.written = 0
        for start in range(0, len(self.text), 3):
            self.written += 1
            yield Delta(self.text[start : start + 3], self.written, (1,))
        yield Finished(self.reason, self.written)

    @property
    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))

    def messages(self, **more: Any) -> Any:
        """The final message of a stream, which says what the whole one says."""

        async def run() -> Any:
            client = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="a", http_client=self.http)
            body = {**message(self), "tools": [TOOL], "max_tokens": 400, **more}
            whole = await client.messages.create(**body)
            async with client.messages.stream(**body) as events:
                streamed = await events.get_final_message()
            assert streamed.content == whole.content or [
                (block.type, getattr(block, "input", None)) for block in streamed.content
            ] == [(block.type, getattr(block, "input", None)) for block in whole.content]
            assert streamed.stop_reason == whole.stop_reason
            assert streamed.usage.output_tokens == whole.usage.output_tokens
            return whole

        return asyncio.run(run())

    def chat(self, **more: Any) -> Any:
        """The choice of a stream, which says what the whole one says."""

        async def run() -> Any:
            client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=self.http)
            body = {**chat(self), "tools": [FUNCTION], **more}
            whole = (await client.chat.completions.create(**body)).choices[0]
            try:
                async with client.chat.completions.stream(**body) as events:
                    streamed = (await events.get_final_completion()).choices[0]
            except openai.LengthFinishReasonError as cut_off:
                streamed = cut_off.completion.choices[0]
            assert streamed.finish_reason == whole.finish_reason
            assert (streamed.message.content or None) == (whole.message.content or None)
            ours, theirs = (
                [(made.function.name, made.function.arguments) for made in choice.message.tool_calls or ()]
                for choice in (whole, streamed)
            )
            assert ours == theirs
            assert getattr(streamed.message, "reasoning_content", None) == getattr(
                whole.message, "reasoning_content", None
            )
            return whole

        return asyncio.run(run())

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream."""

        async def run() -> Exchange:
            return await Exchange(self, path, {**body, "stream": True}).whole()

        exchange = asyncio.run(run())
        assert exchange.status == 200
        lines = exchange.body.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


def test_calls_are_blocks_of_a_message(tmp_path):
    answer = Scripted(tmp_path, TWO_CALLS).messages()
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use", "text"]
    first, a, b, last = answer.content
    assert (first.text, last.text) == ("I look.", "Wait.")
    assert [(block.name, block.input) for block in (a, b)] == [("look_up", {"word": "a"}), ("look_up", {"word": "b"})]
    assert a.id != b.id
    assert all(block.id.startswith("toolu_") for block in (a, b))
    assert answer.stop_reason == "tool_use"


def test_calls_are_those_of_a_chat_message(tmp_path):
    answer = Scripted(tmp_path, TWO_CALLS).chat()
    assert answer.message.content == "I look.\nWait."
    arguments = [json.loads(made.function.arguments) for made in answer.message.tool_calls]
    assert arguments == [{"word": "a"}, {"word": "b"}]
    assert len({made.id for made in answer.message.tool_calls}) == 2
    assert answer.finish_reason == "tool_calls"


def test_content_is_null_beside_calls_alone(tmp_path):
    assert Scripted(tmp_path, call("a")).chat().message.content is None
    assert [block.type for block in Scripted(tmp_path, call("a")).messages().content] == ["tool_use"]


def test_the_events_of_a_messages_stream(tmp_path):
    gateway = Scripted(tmp_path, THOUGHT + "I look.\n" + call("a"))
    events = gateway.events("/v1/messages", message(gateway, tools=[TOOL]))
    kinds = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    delta = "content_block_delta"
    assert list(dict.fromkeys(kinds)) == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        (delta, 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        (delta, 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert starts[2]["input"] == {}


def test_the_chunks_of_a_chat_stream(tmp_path):
    gateway = Scripted(tmp_path, THOUGHT + call("a") + call("b"))
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in gateway.events("/v1/chat/completions", chat(gateway, tools=[FUNCTION]))
    ]
    calls = [made for delta in deltas for made in delta.get("tool_calls", ())]
    assert [made["index"] for made in calls] == [0, 1]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, a word."
    assert not any(delta.get("content") for delta in deltas)


def test_thoughts_and_calls_are_billed_as_all_output(tmp_path):
    """Every token drawn, delimiters included, in both APIs; the parts of the price are its sum."""
    gateway = Scripted(tmp_path, THOUGHT + TWO_CALLS)
    ours = gateway.messages().usage
    body = chat(gateway, tools=[FUNCTION], stream_options={"include_usage": True})
    chunks = gateway.events("/v1/chat/completions", body)
    (theirs,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert ours.output_tokens == theirs["completion_tokens"] == gateway.written
    for price in (ours.warmkv["price"], theirs["warmkv"]["price"]):
        assert price["output"] == pytest.approx(gateway.written * gateway.config.prices.output / 1e6)
        parts = price["input"] + price["read"] + sum(price["write"].values()) + price["output"]
        assert price["total"] == pytest.approx(parts)


def test_text_is_streamed_as_it_comes_beside_tools(tmp_path):
    gateway = Scripted(tmp_path, "abcdefghi")
    events = gateway.events("/v1/messages", message(gateway, tools=[TOOL]))
    assert [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"] == [
        "abc",
        "def",
        "ghi",
    ]


def test_thinking_is_signed_by_the_service(tmp_path):
    for text in (THOUGHT + "Yes.", THOUGHT + call("a")):
        thinking, *_ = Scripted(tmp_path, text).messages().content
        assert thinking.thinking == "Hm, a word."
        assert verify(thinking.thinking, thinking.signature, b"secret")
    gateway = Scripted(tmp_path, THOUGHT)  # thinking and nothing else
    events = gateway.events("/v1/messages", message(gateway))
    signature = next(event["delta"]["signature"] for event in events if "signature" in event.get("delta", {}))
    assert verify("Hm, a word.", signature, b"secret")


def test_thinking_that_is_to_be_omitted_is_in_the_signature_alone(tmp_path):
    """As Claude Code asks for it; when it comes back, the template gets it all the same."""
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    thinking, called = Scripted(tmp_path, THOUGHT + call("a")).messages(**omitted).content
    assert (thinking.thinking, called.name) == ("", "look_up")
    assert restore("", thinking.signature, b"secret") == "Hm, a word."
    gateway = Scripted(tmp_path, THOUGHT + "Yes.")
    events = gateway.events("/v1/messages", message(gateway, **omitted))
    assert not any(event.get("delta", {}).get("type") == "thinking_delta" for event in events)


def test_reasoning_is_a_field_of_its_own(tmp_path):
    answer = Scripted(tmp_path, THOUGHT + "Yes.").chat(tools=[])
    assert (answer.message.reasoning_content, answer.message.content) == ("Hm, a word.", "Yes.")
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("length", [10, 40, 60])
def test_a_call_that_is_cut_off_is_text(tmp_path, length):
    text = ("I look.\n" + call("a"))[:length]
    answer = Scripted(tmp_path, text, "length").messages()
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == text
    assert answer.stop_reason == "max_tokens"
    choice = Scripted(tmp_path, text, "length").chat()
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "length")


def test_whole_calls_before_the_limit_stay(tmp_path):
    text = call("a") + call("b")[:30]
    answer = Scripted(tmp_path, text, "length").messages()
    assert [block.type for block in answer.content] == ["tool_use", "text"]
    assert answer.stop_reason == "max_tokens"
    assert Scripted(tmp_path, text, "length").chat().finish_reason == "length"


def test_no_call_is_read_where_none_is_wanted(tmp_path):
    text = call("a").strip()
    answer = Scripted(tmp_path, text).messages(tool_choice={"type": "none"})
    assert [(block.type, block.text) for block in answer.content] == [("text", text)]
    assert answer.stop_reason == "end_turn"
    assert Scripted(tmp_path, text).chat(tool_choice="none").message.content == text
    assert Scripted(tmp_path, text).chat(tools=[]).message.content == text


def test_without_parallel_calls_the_replica_is_stopped_behind_the_first(tmp_path):
    gateway = Scripted(tmp_path, call("a") * 20)
    answer = gateway.messages(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in answer.content] == ["tool_use"]
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens <= len(call("a")) // 3 + 2
    assert gateway.written < 30  # of 500
    gateway = Scripted(tmp_path, call("a") * 20)
    choice = gateway.chat(parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    assert gateway.written < 30
    assert set(gateway.statuses()) == {"ok"}


def test_a_named_response_template_reads_answers(tmp_path):
    """model.response_template names another family, or none."""
    named = "model.response_template=mistral"
    text = '[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "a"}}]'
    assert Scripted(tmp_path, text, "end", named).messages().content[0].input == {"word": "a"}
    assert Scripted(tmp_path, call("a"), "end", "model.response_template=none").messages().content[0].type == "text"


def test_a_round_trip_of_a_conversation(tmp_path):
    """What was answered is sent back with results, in both APIs."""
    gateway = Scripted(tmp_path, TWO_CALLS)
    answer = gateway.messages()
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "found"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    gateway.text = "Done."
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": results},
    ]
    assert gateway.messages(messages=history).content[0].text == "Done."
    gateway.text = TWO_CALLS
    choice = gateway.chat()
    gateway.text = "Done."
    history = [
        {"role": "user", "content": "hello"},
        choice.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": made.id, "content": "found"} for made in choice.message.tool_calls),
    ]
    assert gateway.chat(messages=history).message.content == "Done."
    ids = gateway.requests[-1].token_ids
    prompt = load_tokenizer(gateway.config.model).decode(ids)
    assert '{"name": "look_up", "arguments": {"word": "a"}}' in prompt
    assert prompt.count("<|im_start|>tool\nfound<|im_end|>") == 2


def test_text_behind_calls_of_a_response_does_not_part_them_from_their_results(tmp_path):
    gateway = Scripted(tmp_path, TWO_CALLS)
    tool = {"type": "function", **FUNCTION["function"], "strict": False}

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=gateway.http)
        body: Any = {"model": gateway.config.model.name, "tools": [tool]}
        first = await client.responses.create(**body, input="hello")
        assert [item.type for item in first.output] == ["message", "function_call", "function_call", "message"]
        gateway.text = "Done."
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": name, "output": "found"} for name in calls]
        later = await client.responses.create(**body, input=results, previous_response_id=first.id)
        assert later.output_text == "Done."
        prompt = load_tokenizer(gateway.config.model).decode(gateway.requests[-1].token_ids)
        assert "I look.\nWait." in prompt
        assert prompt.count("<|im_start|>tool\nfound<|im_end|>") == 2

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_sdk_calls_a_function_and_gets_its_answer(tmp_path, stream):
    """It asks for a conversation that the server holds, and goes on without."""
    gateway = Scripted(tmp_path, "I look.\n" + call("a"))
    asked = []

    @anthropic.beta_async_tool
    async def look_up(word: str) -> str:
        """Find a word."""
        asked.append(word)
        gateway.text = "It is there."
        return "found"

    async def run() -> None:
        client = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="a", http_client=gateway.http)
        runner = client.beta.messages.tool_runner(**message(gateway, max_tokens=400), tools=[look_up], stream=stream)
        last = await runner.until_done()
        assert [block.text for block in last.content] == ["It is there."]

    asyncio.run(run())
    assert asked == ["a"]
    assert len(gateway.requests) == 2


A_CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "a"}'}}
USER = {"role": "user", "content": "hello"}


def assistant(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": "found"}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([USER, assistant(A_CALL)], "messages.1.tool_calls.0: no tool message answers 'c1'"),
        ([USER, assistant(A_CALL), USER], "messages.1.tool_calls.0: no tool message answers 'c1'"),
        ([USER, result("c1")], "messages.1.tool_call_id: 'c1' is no call"),
        ([USER, assistant(A_CALL), result("c2")], "messages.2.tool_call_id: 'c2' is no call"),
        ([USER, assistant(A_CALL), result("c1"), result("c1")], "messages.3.tool_call_id: two results for 'c1'"),
        ([USER, assistant(A_CALL, A_CALL), result("c1")], "messages.1.tool_calls: ids must be unique"),
        ([{**USER, "tool_calls": [A_CALL]}], "messages.0.tool_calls: only allowed in assistant messages"),
        ([{**USER, "tool_call_id": "c1"}], "messages.0.tool_call_id: only allowed in tool messages"),
        ([USER, assistant(), USER], "messages.1: a message needs content"),
        (
            [USER, assistant({**A_CALL, "function": {"name": "look_up", "arguments": "[1]"}}), result("c1")],
            "messages.1.tool_calls.0.function.arguments: not a JSON object",
        ),
        (
            [USER, assistant({**A_CALL, "function": {"name": "look_up", "arguments": '{"wo'}}), result("c1")],
            "messages.1.tool_calls.0.function.arguments: no JSON",
        ),
        (
            [USER, assistant({**A_CALL, "function": {"name": "no name", "arguments": "{}"}}), result("c1")],
            "messages.1.tool_calls.0.function.name",
        ),
    ],
)
def test_a_history_that_does_not_fit_is_refused_with_the_place(tmp_path, messages, told):
    async def run() -> None:
        gateway = Scripted(tmp_path, "Yes.")
        exchange = await Exchange(gateway, "/v1/chat/completions", chat(gateway, messages=messages)).whole()
        assert exchange.status == 400
        assert told in exchange.error
        assert gateway.requests == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tools": [FUNCTION, FUNCTION]}, "tools: names must be unique"),
        ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
    ],
)
def test_tools_that_are_none_are_refused(tmp_path, more, told):
    async def run() -> None:
        gateway = Scripted(tmp_path, "Yes.")
        exchange = await Exchange(gateway, "/v1/chat/completions", chat(gateway, **more)).whole()
        assert (exchange.status, gateway.requests) == (400, [])
        assert told in exchange.error

    asyncio.run(run())


@pytest.mark.parametrize(
    "messages",
    [
        [USER, assistant(A_CALL, content=""), result("c1"), {"role": "assistant", "content": "Found."}, USER],
        [USER, assistant(A_CALL, content="I look.", reasoning_content="Hm"), result("c1")],
        [USER, assistant({**A_CALL, "id": "c1"}, {**A_CALL, "id": "c2"}), result("c2"), result("c1")],
        [USER, assistant({**A_CALL, "function": {"name": "look_up", "arguments": ""}}), result("c1")],
        [USER, assistant(A_CALL), {**result("c1"), "content": [{"type": "text", "text": "found"}]}],
        [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm"}, USER],
    ],
)
def test_histories_with_calls_are_taken(tmp_path, messages):
    async def run() -> None:
        gateway = Scripted(tmp_path, "Yes.")
        for more in ({}, {"tools": [FUNCTION]}):
            body = chat(gateway, messages=messages, **more)
            exchange = await Exchange(gateway, "/v1/chat/completions", body).whole()
            assert exchange.status == 200, exchange.body

    asyncio.run(run())


def test_plain_text_is_written_as_before(tmp_path):
    """Without tools nothing is parsed: an event for every token, made by one function."""
    gateway = Scripted(tmp_path, "<tool_call> abc", "end", "model.response_template=none")
    events = gateway.events("/v1/messages", message(gateway, tools=[TOOL]))
    assert [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"] == [
        gateway.text[start : start + 3] for start in range(0, len(gateway.text), 3)
    ]
    assert gateway.requests[0].sampling.shown_ids == ()


def test_a_thinking_budget_reaches_the_replica_where_its_ends_are_tokens(tmp_path, monkeypatch):
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    asked = {**message(Gateway(tmp_path)), **enabled}
    plain = Scripted(tmp_path, "Yes.")

    async def ignored() -> str:
        exchange = await Exchange(plain, "/v1/messages", asked).whole()
        return exchange.headers["x-warmkv-ignored"]

    assert asyncio.run(ignored()) == "thinking.budget_tokens"
    assert plain.requests[-1].sampling.thinking is None
    made = ResponseFormat.of

    def of(*args: Any) -> Any:
        found = made(*args)
        return found and replace(found, thinking_ids=(5, 6))

    monkeypatch.setattr(ResponseFormat, "of", of)
    gateway = Scripted(tmp_path, "Yes.")
    gateway.messages(**enabled)
    assert gateway.requests[-1].sampling.thinking == ThinkingBudget(1024, 5, 6)
    gateway.chat(extra_body={"thinking_token_budget": 7})
    assert gateway.requests[-1].sampling.thinking == ThinkingBudget(7, 5, 6)
    gateway.chat(extra_body={"thinking_token_budget": 7, "guided_grammar": 'start: "a"'}, tools=[])
    assert gateway.requests[-1].sampling.constraint == Constraint("grammar", 'start: "a"')
    assert gateway.requests[-1].sampling.thinking is None  # a grammar of one's own begins with the answer
    gateway.messages()
    assert gateway.requests[-1].sampling.thinking is None
    behind_vllm = Scripted(tmp_path, "Yes.", "end", "engine.kind=vllm")
    behind_vllm.messages(**enabled)
    assert behind_vllm.requests[-1].sampling.thinking is None


def test_the_ends_of_thinking_are_found_among_a_tokenizer_s_tokens():
    tokens = {number: AddedToken(text) for number, text in ((7, "<think>"), (9, "</think>"), (11, "<tool_call>"))}
    qwen = SimpleNamespace(chat_template="<tool_call> <think></think>", added_tokens_decoder=tokens)
    assert ResponseFormat.of(qwen).thinking_ids == (7, 9)
    del tokens[9]
    assert ResponseFormat.of(qwen).thinking_ids is None

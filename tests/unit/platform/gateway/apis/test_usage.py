"""What an answer has used, as the SDKs tell it at its end: the price of a stream, and the tokens of thinking."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from tests.unit.platform.exchanges import Exchange, chat, message
from tests.unit.platform.gateway.apis.test_tool_calls import FUNCTION, THOUGHT, TOOL, TWO_CALLS, Scripted, call
from warmkv.config import ModelConfig
from warmkv.platform.gateway.apis.answer import Answer
from warmkv.platform.gateway.apis.chat_parsing.format import ResponseFormat
from warmkv.platform.gateway.apis.chat_parsing.parser import PartParser
from warmkv.replicas.loading.tokenizer import load_tokenizer


def test_a_stream_begins_without_a_price_and_ends_with_it(tmp_path):
    gateway = Scripted(tmp_path, "abcdefghi")
    start, *_, delta, _ = gateway.events("/v1/messages", message(gateway))
    begun, ended = start["message"]["usage"]["warmkv"], delta["usage"]["warmkv"]
    assert ended.keys() - begun.keys() == {"price"}
    assert {name: value for name, value in ended.items() if name != "price"} == begun
    assert ended["price"]["output"] == pytest.approx(3 * gateway.config.prices.output / 1e6)


@pytest.mark.parametrize("beta", [False, True])
def test_the_helper_of_streams_tells_the_price_of_the_whole_answer(tmp_path, beta):
    """In the details of the output, which it takes from the last event; a whole answer has it there, too."""
    gateway = Scripted(tmp_path, "abcdefghi")

    async def run() -> tuple[Any, Any]:
        client = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="a", http_client=gateway.http)
        made = client.beta.messages if beta else client.messages
        async with made.stream(**message(gateway)) as events:
            streamed = (await events.get_final_message()).usage
        return streamed, (await made.create(**message(gateway))).usage

    streamed, whole = asyncio.run(run())
    assert "price" not in streamed.warmkv
    price = streamed.output_tokens_details.warmkv["price"]
    assert price == whole.output_tokens_details.warmkv["price"] == whole.warmkv["price"]
    assert price["output"] == pytest.approx(3 * gateway.config.prices.output / 1e6)
    assert price["total"] == pytest.approx(price["input"] + price["output"])


def thought(folder: Path, text: str, reason: Any = "end") -> list[int]:
    """The tokens of thinking that every API tells of an answer, whole and streamed, and those of its output."""
    gateway = Scripted(folder, text, reason)
    flat = {"type": "function", **FUNCTION["function"]}

    async def run() -> list[int]:
        theirs = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=gateway.http)
        ours = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="a", http_client=gateway.http)
        found, outputs = list[int](), list[int]()
        body: Any = {**message(gateway), "tools": [TOOL]}
        async with ours.messages.stream(**body) as events:
            usages = [(await ours.messages.create(**body)).usage, (await events.get_final_message()).usage]
        found += [usage.output_tokens_details.thinking_tokens for usage in usages]
        outputs += [usage.output_tokens for usage in usages]
        body = {**chat(gateway), "tools": [FUNCTION]}
        chunks = await theirs.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        usages = [(await theirs.chat.completions.create(**body)).usage, [chunk async for chunk in chunks][-1].usage]
        found += [usage.completion_tokens_details.reasoning_tokens for usage in usages]
        outputs += [usage.completion_tokens for usage in usages]
        body = {"model": "tiny", "input": "hello", "tools": [flat]}
        parts = await theirs.responses.create(**body, stream=True)
        usages = [(await theirs.responses.create(**body)).usage, [part async for part in parts][-1].response.usage]
        found += [usage.output_tokens_details.reasoning_tokens for usage in usages]
        outputs += [usage.output_tokens for usage in usages]
        assert set(outputs) == {gateway.written}
        return found

    return asyncio.run(run())


def tokens(text: str) -> int:
    """As many as the replica of these tests makes of a text: three characters each."""
    return -(-len(text) // 3)


def test_an_answer_that_only_thinks_is_thinking_to_its_last_token(tmp_path):
    text = THOUGHT[: THOUGHT.index("word")]
    assert thought(tmp_path, text, "length") == [pytest.approx(tokens(text), abs=tokens("<think>"))] * 6


def test_an_answer_without_thinking_has_no_tokens_of_it(tmp_path):
    assert thought(tmp_path, TWO_CALLS) == [0] * 6


@pytest.mark.parametrize("rest", ["Yes, it is there.", call("a"), f"I look.\n{call('a')}"])
def test_thinking_is_told_from_what_follows(tmp_path, rest):
    long = THOUGHT.replace("a word", "a word and another " * 20)
    made = set(thought(tmp_path, long + rest))
    assert len(made) == 1  # the same in every API
    assert made.pop() == pytest.approx(tokens(long), abs=4)  # delimiters of several tokens


def test_text_and_thinking_that_come_together_are_told_apart_by_characters():
    """As for a client that reads slowly: all that waited comes as one."""
    format_ = ResponseFormat.of(load_tokenizer(ModelConfig()), "hermes")
    answer: Any = SimpleNamespace(output_tokens=100, parsed_tokens=0, thinking_tokens=0)
    thinking, text = f"<think>{'thought ' * 50}</think>", "answer " * 50
    Answer._parsed(answer, PartParser(format_.template, ""), thinking + text)
    assert answer.thinking_tokens == pytest.approx(100 * len(thinking) / len(thinking + text), abs=1)


def test_plain_completions_tell_nothing_apart(tmp_path):
    gateway = Scripted(tmp_path, THOUGHT)

    async def run() -> Any:
        body = {"model": "tiny", "prompt": "hello"}
        return (await Exchange(gateway, "/v1/completions", body).whole()).json["usage"]

    assert "completion_tokens_details" not in asyncio.run(run())

"""The OpenAI-compatible API through the real `openai` client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

LONG = "for position in range(length):\n    total += position\n" * 40


def chat(server: Any, content: Any, key: str = "bob", **options: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0, "model": server.config.model.name, **options}
    return server.openai(key).chat.completions.create(messages=[{"role": "user", "content": content}], **options)


def test_chat_whole_and_streamed_agree(server):
    whole = chat(server, "def main():", max_tokens=12)
    chunks = list(chat(server, "def main():", max_tokens=12, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_whole_blocks_are_reused_without_marks(server):
    first = chat(server, LONG + "a", key="auto").usage
    second = chat(server, LONG + "b", key="auto").usage
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = second.prompt_tokens_details.cached_tokens
    assert cached > 0
    assert cached % 64 == 0
    assert second.prompt_tokens == first.prompt_tokens
    assert second.warmkv["price"]["total"] < first.warmkv["price"]["total"]


def test_plain_completion(server):
    client, model = server.openai(), server.config.model.name
    whole = client.completions.create(model=model, prompt="import os\nimport ", max_tokens=8, temperature=0)
    chunks = client.completions.create(
        model=model, prompt="import os\nimport ", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.object == "text_completion"


def test_seed_and_stop(server):
    def draw(seed: int) -> str:
        return chat(server, "def main():", temperature=1.0, seed=seed, max_tokens=20).choices[0].message.content

    assert draw(3) == draw(3)
    text = chat(server, "def main():", max_tokens=20).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    stopped = chat(server, "def main():", max_tokens=20, stop=stop).choices[0]
    assert stopped.message.content == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_system_and_developer_are_one_role(server):
    def prompt(role: str) -> int:
        return (
            server.openai()
            .chat.completions.create(
                model=server.config.model.name,
                max_tokens=1,
                messages=[{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            )
            .usage.prompt_tokens
        )

    assert prompt("system") == prompt("developer")


def test_an_answer_can_be_sent_back_as_it_came(server):
    first = chat(server, "def main():").choices[0].message
    messages = [{"role": "user", "content": "def main():"}, first, {"role": "user", "content": "go on"}]
    second = server.openai().chat.completions.create(
        model=server.config.model.name, max_tokens=2, messages=messages, temperature=None, logprobs=False, n=1
    )
    assert second.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream"),
        ({"extra_body": {"warmkv": {"polcy": "full"}}}, "polcy"),
    ],
)
def test_what_is_refused(server, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        chat(server, "x", **options)


def test_other_errors_are_typed(server):
    with pytest.raises(openai.NotFoundError):
        chat(server, "x", model="other")
    with pytest.raises(openai.BadRequestError, match=r"exceeds? the context"):
        chat(server, "x " * 9000)


def test_a_stream_that_loses_its_replica_is_the_same_to_its_client(server):
    options = {"stream": True, "max_tokens": 20, "temperature": 0.7, "seed": 5}
    before = [chunk.choices[0] for chunk in chat(server, "def rotate(", **options)]
    server.faults += [2, 4]
    after = [chunk.choices[0] for chunk in chat(server, "def rotate(", **options)]
    assert server.faults == []
    text = "".join(choice.delta.content or "" for choice in before)
    assert "".join(choice.delta.content or "" for choice in after) == text
    assert after[-1].finish_reason == before[-1].finish_reason


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_what_cannot_be_continued_ends_with_an_error_chunk(server, api):
    server.faults += [3] * (1 + server.config.gateway.retries)
    options = {"stream": True, "max_tokens": 200, "extra_body": {"warmkv": {"ignore_eos": True}}}
    if api == "chat":
        chunks = chat(server, "Hello", **options)
    else:
        chunks = server.openai().completions.create(model=server.config.model.name, prompt="Hello", **options)
    seen = []
    choices = (seen.append(chunk.choices[0]) for chunk in chunks)
    with pytest.raises(openai.APIError, match="ConnectionError"):
        list(choices)
    assert seen
    assert all(choice.finish_reason is None for choice in seen)

"""Pings while a prompt waits, as the SDKs meet them over real HTTP: the engine stands still until some have come."""

from __future__ import annotations

import threading
from unittest.mock import patch

import anthropic
import openai
import pytest

from tests.polling import until
from warmkv.platform.gateway import endpoints

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def pinging(serve):
    with patch.object(endpoints, "PING_SECONDS", 0.01):
        yield serve("engine.threads=1")


def test_the_anthropic_sdk_passes_over_pings(pinging):
    client: anthropic.Anthropic = pinging.anthropic()
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask).content[0].text
    texts: list[str] = []

    def read() -> None:
        with client.messages.stream(**ask) as helper:
            texts.append(helper.get_final_text())

    reader = threading.Thread(target=read)
    with pinging.standing_still():
        reader.start()
        with client.messages.with_streaming_response.create(**ask, stream=True) as raw:
            lines = raw.iter_lines()
            assert [next(lines) for _ in range(6)] == ["event: ping", 'data: {"type": "ping"}', ""] * 2
    until(lambda: not reader.is_alive(), "the other stream ends")
    assert texts == [whole]


def test_the_openai_sdk_passes_over_comments(pinging):
    client: openai.OpenAI = pinging.openai()
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "temperature": 0.0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    with pinging.standing_still():
        chunks = client.chat.completions.create(**ask, stream=True)  # returns at the first bytes: a comment
        with client.chat.completions.with_streaming_response.create(**ask, stream=True) as raw:
            lines = raw.iter_lines()
            assert [next(lines) for _ in range(4)] == [": ping", ""] * 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole

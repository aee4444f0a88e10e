"""Log-probabilities of whole answers, which are many, are made and written beside the event loop."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from types import FrameType
from typing import Any

import pytest

from tests.unit.platform.exchanges import STARTED, Exchange, Gateway, chat
from warmkv.platform.gateway.apis.openai import logprobs
from warmkv.platform.gateway.resume import Attempt
from warmkv.replicas.protocol import Admitted, Delta, Event, Finished, TokenLogprobs

TOLD = tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (9, -1.5))) for token in range(20, 25))
MADE = {logprobs.of_chat.__code__, logprobs.of_text.__code__, json.dumps.__code__, json.JSONEncoder.encode.__code__}


async def answer(attempt: Attempt) -> AsyncGenerator[Event]:
    for event in (Admitted(), STARTED, Delta("hello", 5, (20, 21, 22, 23, 24), TOLD), Finished("length", 5)):
        yield event


def tokens_of(body: dict[str, Any]) -> list[float]:
    """Return the log-probabilities of an answer's tokens, whatever API it is in."""
    if "output" in body:
        return [one["logprob"] for one in body["output"][0]["content"][0]["logprobs"]]
    told = body["choices"][0]["logprobs"]
    return told["token_logprobs"] if "token_logprobs" in told else [one["logprob"] for one in told["content"]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_whole_answer_with_log_probabilities_is_made_beside_the_event_loop(tmp_path, path):
    made: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:  # of this thread, the loop's, alone
        if event == "call" and frame.f_code in MADE:
            made.append(frame.f_code.co_qualname)

    async def run() -> Exchange:
        gateway = Gateway(tmp_path)
        gateway.service._send = answer
        model = {"model": gateway.config.model.name}
        bodies = {
            "/v1/chat/completions": chat(gateway, logprobs=True, top_logprobs=2, max_tokens=5),
            "/v1/completions": {**model, "prompt": "hello", "logprobs": 2, "max_tokens": 5},
            "/v1/responses": {**model, "input": "hello", "include": ["message.output_text.logprobs"]},
        }
        exchange = Exchange(gateway, path, bodies[path])
        sys.setprofile(note)
        try:
            return await exchange.whole()
        finally:
            sys.setprofile(None)

    exchange = asyncio.run(run())
    assert exchange.headers["content-type"] == "application/json"
    assert tokens_of(exchange.json) == [-0.5] * 5
    assert made == []

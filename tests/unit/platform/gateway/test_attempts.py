"""Attempts at an answer, from the gateway's line on: who waits keeps its place, what cannot go on begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from tests import clocks
from tests.clocks import SkippingLoop, skip
from tests.unit.platform.exchanges import STARTED, Exchange, chat, message
from tests.unit.platform.gateway.apis.test_tool_calls import FUNCTION, TOOL, Scripted, call
from tests.unit.platform.wires import Cluster
from tests.unit.replicas.conftest import make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import load
from warmkv.platform.gateway.apis.errors import ReplicaFailedError
from warmkv.platform.gateway.resume import Attempt, Events, Sink, resumed
from warmkv.replicas.protocol import (
    Admitted,
    Constraint,
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    UnservableRequestError,
)

STALL = 1000.0  # seconds of silence, which are skipped


async def turns() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def test_who_waits_in_line_for_long_keeps_its_place():
    async def scenario() -> None:
        config = load(flags=[f"gateway.stall_seconds={STALL}"], environ={})
        cluster = Cluster(0, config)
        tasks = []
        for name in "ab":
            events = resumed(make_request(prompt(4), name=name), cluster.sender.send, config.gateway, print)
            tasks.append(asyncio.create_task(anext(events)))
            await turns()
            skip(STALL * 0.6)
            await turns()
        assert [attempt.request.id for attempt in cluster.sender._line.values()] == ["a", "b"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert cluster.idle
        cluster.replies.close()

    clocks.run(scenario(), SkippingLoop)


async def dies(attempt: Attempt, text: str) -> AsyncGenerator[Event]:
    """Write a text, then fail as a replica that dies."""
    attempt.replica = "gone"
    delta = Delta(text, 5, (7,) * 5)
    for event in (Admitted(), STARTED, *(() if attempt.take(delta) else (delta,)), Failed("dead")):
        yield event


def over_vllm(asked: GenerateRequest, sink: Sink, attempts: list[Attempt]) -> list[Event]:
    """Answer a request over a replica of vLLM, after one that has died behind an "x"."""

    async def scenario() -> list[Event]:
        config = load(flags=["engine.kind=vllm"], environ={})
        cluster, events = Cluster(1, config), list[Event]()

        def send(attempt: Attempt) -> Events:
            attempts.append(attempt)
            return cluster.sender.send(attempt) if attempt.given_up else dies(attempt, "x")

        async def answered() -> None:
            async for event in resumed(asked, send, config.gateway, print, sink=sink):
                events.append(event)
                if isinstance(event, Delta) and sink.take is not None:  # it came while nobody took it
                    sink.take(event)

        answer = asyncio.create_task(answered())
        while not answer.done():
            for replica in cluster.replicas:
                replica.deliver(1 << 20)
                replica.step(9)
            await asyncio.sleep(0)
        cluster.replies.close()
        await answer
        return events

    return clocks.run(scenario(), SkippingLoop)


def asked_of_vllm(**sampling: Any) -> GenerateRequest:
    asked = make_request(prompt(4))
    return replace(asked, sampling=replace(asked.sampling, **sampling))


LOST: list[dict[str, Any]] = [{"constraint": Constraint("regex", "a+")}, {"presence_penalty": 1.0}]


@pytest.mark.parametrize("sampling", LOST, ids=["constraint", "penalty"])
def test_what_vllm_cannot_go_on_with_begins_anew_while_its_client_has_nothing(sampling):
    asked, texts, attempts = asked_of_vllm(**sampling), list[str](), list[Attempt]()
    sink = Sink(lambda delta: texts.append(delta.text), texts.clear)
    assert over_vllm(asked, sink, attempts)[-1] == Finished("end", 4)
    assert texts == ["".join(map(chr, asked.token_ids))]
    assert sink.progress is not None
    assert sink.progress.output_ids == list(asked.token_ids)
    assert [len(attempt.request.resume) for attempt in attempts] == [0, 5, 0]


def test_a_constrained_answer_that_its_client_has_a_part_of_ends_with_the_replica_s_error():
    asked = asked_of_vllm(constraint=Constraint("regex", "a+"), presence_penalty=1.0)
    with pytest.raises(ReplicaFailedError, match="the rest of a constrained answer"):
        over_vllm(asked, Sink(lambda delta: None), [])


def test_an_answer_that_its_client_has_a_part_of_goes_on_on_vllm_without_penalties_on_it():
    asked, texts, attempts = asked_of_vllm(frequency_penalty=1.0), list[str](), list[Attempt]()
    sink = Sink(lambda delta: texts.append(delta.text))
    assert over_vllm(asked, sink, attempts)[-1] == Finished("end", 4)
    assert "".join(texts) == "x" + "".join(map(chr, asked.token_ids[1:]))
    assert [len(attempt.request.resume) for attempt in attempts] == [0, 5, 5]


class Dying(Scripted):
    """Play a gateway before replicas of which the first dies behind `begun`; no other goes on with what it wrote."""

    begun = ""

    async def answer(self, attempt: Attempt) -> AsyncGenerator[Event]:
        if attempt.request.resume:
            raise UnservableRequestError("no replica goes on with it")
        async for event in super().answer(attempt) if attempt.given_up else dies(attempt, self.begun):
            yield event


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("begun", "is_shown"), [('<tool_call>\n{"name": "lo', False), ("I see that ", True)])
def test_an_answer_begins_anew_while_its_client_has_nothing_of_it(tmp_path, path, stream, begun, is_shown):
    gateway = Dying(tmp_path, call("right"))
    gateway.begun = begun
    tools: dict[str, Any] = {"tools": [TOOL if path == "/v1/messages" else FUNCTION], "stream": stream}
    body = (message if path == "/v1/messages" else chat)(gateway, **tools)

    async def run() -> Exchange:
        return await Exchange(gateway, path, body).whole()

    told = asyncio.run(run())
    assert told.status == 200
    (record,) = gateway.records
    if stream and is_shown:
        assert b"The replica failed: no replica goes on with it" in told.body
        assert (record.status, record.error) == ("error", "api_error")
    else:
        assert b"right" in told.body
        assert begun.encode() not in told.body
        assert (record.status, record.usage.output) == ("ok", gateway.written)

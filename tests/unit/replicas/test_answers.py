"""Requests of gateways in a replica: taken, refused, cancelled, fetched for, and answered over their connection."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import pytest

from tests import clocks
from tests.polling import PATIENCE
from tests.tokenizers import of_words
from tests.unit.platform.exchanges import until
from tests.unit.platform.wires import Wire, ignore
from tests.unit.replicas.conftest import VOCABULARY, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.policies.transfer import Fetch
from warmkv.replicas.answers import Answers
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.frames import encode_order
from warmkv.replicas.links import Link
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.protocol import (
    STOPPING,
    Admitted,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Refused,
    Started,
)

LETTERS = of_words([chr(0x4E00 + token) for token in range(VOCABULARY)])


class Fetches:
    """Brings nothing, when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    def helps(self, request: GenerateRequest) -> bool:
        return request.fetch is not None

    async def prepare(self, request: GenerateRequest) -> None:
        await self.may_end.wait()

    def started(self, request: GenerateRequest, started: Started) -> None: ...


class Heard(Link):
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(ignore, ignore)
        self.events: dict[int, list[Event]] = {}

    def send(self, stream: int, event: Event) -> None:
        self.events.setdefault(stream, []).append(event)

    def kinds(self, stream: int) -> list[type]:
        return [type(event) for event in self.events.get(stream, ())]


class Setup:
    def __init__(self, most: int = 9, **limits: Any) -> None:
        self.engine = Engine(
            prepare(random_model("llama")), EngineConfig(**limits), PrefixCacheConfig(), clock=lambda: 0.0
        )
        self.fetches, self.link = Fetches(), Heard()
        self.hung: Exception | None = None
        self.answers = Answers(OutputProcessor(self.engine, LETTERS, 1e9), self.fetches, self.check, most)

    def check(self) -> None:
        if self.hung is not None:
            raise self.hung

    def take(self, stream: int, new: int = 3, **more: Any) -> None:
        request = make_request(prompt(5, seed=stream), new=new, name=str(stream))
        self.answers.take(self.link, stream, replace(request, **more))

    async def finish(self) -> None:
        while self.engine.step():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)


def within(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_a_replica_answers_what_it_is_sent_and_takes_no_more_than_its_limit():
    async def scenario() -> None:
        here = Setup(most=2)
        for stream in range(3):
            here.take(stream)
        assert [here.link.events[stream][0] for stream in range(3)] == [Admitted(1), Admitted(2), Refused("busy")]
        assert here.answers.ongoing == 2
        await here.finish()
        assert here.answers.ongoing == 0
        for stream in range(2):
            assert here.link.kinds(stream)[:2] == [Admitted, Started]
            assert here.link.events[stream][-1] == Finished("length", 3)
        here.take(4)
        assert here.link.events[4] == [Admitted(1)]

    within(scenario)


def test_what_the_engine_refuses_is_said_to_the_gateway():
    async def scenario() -> None:
        here = Setup(max_slots=1, max_queue=1, max_context=64)
        for stream in range(3):
            here.take(stream)
        (full,) = [events[0] for events in here.link.events.values() if isinstance(events[0], Refused)]
        assert (full.reason, full.waiting) == ("full", 1)
        here.take(7, new=1000)
        assert isinstance(refused := here.link.events[7][0], Refused)
        assert refused.reason == "unservable"
        assert "64" in refused.message
        here.hung = RuntimeError("the engine has been in one step for 99 s")
        here.take(8)
        assert here.link.events[8] == [Failed("RuntimeError: the engine has been in one step for 99 s")]
        before = here.answers.ongoing
        assert before == 2
        await here.finish()
        assert here.answers.ongoing == 0

    within(scenario)


@pytest.mark.parametrize("fetches", [False, True])
def test_a_cancelled_request_is_told_ended_and_leaves_the_engine(fetches):
    async def scenario() -> None:
        here = Setup()
        here.take(1, new=400, **({"fetch": Fetch("other", 1)} if fetches else {}))
        await asyncio.sleep(0)
        if not fetches:
            here.engine.step()
        here.answers.take(here.link, 1, None)
        here.answers.take(here.link, 1, None)  # and again, as it is gone
        here.answers.take(here.link, 99, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [event for event in here.link.events[1] if isinstance(event, Finished)] == [Finished("cancelled", 0)]
        assert 99 not in here.link.events
        assert here.answers.ongoing == 0
        here.engine.step()
        assert here.engine.stats().decoding == here.engine.stats().waiting == 0

    within(scenario)


def test_a_prefix_is_fetched_before_the_request_is_submitted():
    async def scenario() -> None:
        here = Setup()
        here.take(1, fetch=Fetch("other", 1))
        await asyncio.sleep(0)
        assert 1 not in here.link.events
        here.fetches.may_end.set()
        await until(lambda: here.link.kinds(1) == [Admitted])
        await here.finish()
        assert isinstance(here.link.events[1][-1], Finished)

    within(scenario)


def test_a_lost_link_cancels_what_came_over_it_and_nothing_else():
    async def scenario() -> None:
        here, other = Setup(), Heard()
        here.take(1, new=400)
        here.answers.take(other, 1, make_request(prompt(6), new=3, name="other"))
        here.answers.lost(here.link)
        await here.finish()
        assert here.answers.ongoing == 0
        assert other.events[1][-1] == Finished("length", 3)

    within(scenario)


def test_a_replica_that_is_stopped_ends_what_it_has_and_takes_no_more():
    async def scenario() -> None:
        here = Setup()
        here.take(1)
        draining = asyncio.ensure_future(here.answers.drain(PATIENCE))
        await asyncio.sleep(0)
        here.take(2)
        assert here.link.events[2] == [Refused("busy")]
        assert not draining.done()
        await here.finish()
        assert draining.done()
        assert here.link.events[1][-1] == Finished("length", 3)
        await here.answers.drain(PATIENCE)  # at once

    within(scenario)


def test_what_a_replica_that_is_stopped_has_not_ended_in_time_fails_so_that_another_resumes_it():
    async def scenario() -> None:
        here, loop = Setup(), asyncio.get_running_loop()
        here.take(1, new=400)
        here.engine.step()
        here.take(2)  # which has not begun
        here.take(3, fetch=Fetch("other", 1))
        await here.answers.drain(30)
        assert loop.time() == 30
        assert here.answers.ongoing == 3
        await here.answers.give_up()
        assert here.link.kinds(1)[:2] == [Admitted, Started]
        assert [here.link.events[stream][-1] for stream in (1, 2, 3)] == [STOPPING] * 3
        assert here.answers.ongoing == 0
        here.engine.step()
        assert here.engine.stats().decoding == here.engine.stats().waiting == here.engine.stats().slots == 0
        here.fetches.may_end.set()
        await here.finish()
        assert sum(here.link.kinds(stream).count(Failed) for stream in (1, 2, 3)) == 3  # nothing follows

    clocks.run(scenario())


def test_an_answer_whose_text_cannot_be_made_fails_alone():
    async def scenario() -> None:
        here = Setup()
        here.take(1)
        here.take(2)
        (output, *_) = here.answers._outputs._outputs

        def no_text(token: int) -> str:
            raise ValueError("no text")

        output.detokenizer.push = no_text  # type: ignore[method-assign]
        await here.finish()
        assert here.link.events[1][-1] == Failed("ValueError: no text")
        assert here.link.events[2][-1] == Finished("length", 3)
        assert here.answers.ongoing == 0

    within(scenario)


def test_a_request_costs_a_replica_few_calls_outside_its_engine():
    """Of Python functions, from the bytes of an order to those of its end; nothing of it is a task. None is called for
    each token of a prompt.
    """
    called: list[CodeType] = []
    outside = ("/warmkv/replicas/answers", "/warmkv/replicas/links", "/warmkv/replicas/frames", "/asyncio/", "/ray/")
    submitting: list[CodeType] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            submitting.append(frame.f_code)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in outside):
            called.append(frame.f_code)

    async def scenario() -> None:
        here, wire = Setup(most=99), Wire()
        link = Link(here.answers.take, here.answers.lost)
        link.connection_made(wire)
        orders = [encode_order(number, make_request(prompt(5), new=2, name=str(number))) for number in range(16)]
        here.take(99)  # what is made once is made
        long = encode_order(98, make_request(prompt(200), new=2, name="98"))
        sys.setprofile(count)
        link.data_received(long)
        sys.setprofile(note)
        link.data_received(b"".join(orders))
        while here.engine.step():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sys.setprofile(None)
        assert wire.data.count(b'"finished"') == 17
        assert here.answers.ongoing == 0

    within(scenario)
    assert len(submitting) < 200, Counter(code.co_qualname for code in submitting)
    ours = [code for code in called if "/warmkv/" in code.co_filename]
    assert len(ours) / 16 <= 13, Counter(code.co_qualname for code in ours)
    assert "create_task" not in {code.co_name for code in called}
    assert not [code for code in called if "/ray/" in code.co_filename]

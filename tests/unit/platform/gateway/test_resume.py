"""Answers that lose their replica, once or again and again, against the same answers undisturbed. Real engines."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import clocks
from tests.clocks import SkippingLoop, skip
from tests.engine_stream import stream
from tests.polling import PATIENCE, until
from tests.tokenizers import of_bytes
from tests.unit.replicas.conftest import VOCABULARY, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import EngineConfig, GatewayConfig, PrefixCacheConfig
from warmkv.platform.gateway.apis.errors import (
    ApiError,
    ReplicaFailedError,
    RequestFailedError,
    from_exception,
    overloaded,
)
from warmkv.platform.gateway.replies import Mailbox
from warmkv.platform.gateway.resume import Attempt, Send, resumed
from warmkv.replicas.answers import Answers
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.links import Link
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.protocol import (
    Admitted,
    Alive,
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    QueueFullError,
    Started,
    UnservableRequestError,
)

Fault = Literal["raises", "fails", "ends", "hangs"]
FAULTS: list[Fault] = ["raises", "fails", "ends", "hangs"]
REPLICAS = 3
BEAT = 5.0  # seconds, of which none passes unless it is skipped
STALL = 1000.0  # seconds of silence: longer than any test runs, and skipped where a replica hangs
POLICIES = ["full", "h2o@20", "streaming_llm@20", "snapkv@20+ring:window=6", "tova@16", "full+kivi4"]

NUMBERS = itertools.count()

# Token ids as UTF-8: letters, and characters of two bytes that come in pieces.
TOKENIZER = of_bytes([*range(ord("A"), ord("A") + 60), *range(0xC3, 0xD5), *range(0xA0, 0xA0 + VOCABULARY - 78)])


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """Yield replicas of the same weights, each in its own thread."""
    settings = EngineConfig(kv_bytes=1 << 26, step_tokens=16)
    made = [
        Engine(
            prepare(random_model("llama")), settings, PrefixCacheConfig(block_size=8), clock=lambda: 0.0, name=str(n)
        )
        for n in range(REPLICAS)
    ]
    threads = [threading.Thread(target=engine.run) for engine in made]
    for thread in threads:
        thread.start()
    yield made
    for engine, thread in zip(made, threads, strict=True):
        engine.stop()
        thread.join()


def cluster(engines: list[Engine], faults: list[tuple[Fault, int]], seen: list[Attempt]) -> Send:
    """Send the n-th attempt to the n-th replica, which shows the n-th fault in place of an event after Admitted."""

    async def send(attempt: Attempt) -> AsyncGenerator[Event]:
        number = len(seen)
        seen.append(attempt)
        engine = engines[number % REPLICAS]
        attempt.replica = engine.name
        fault, after = faults[number] if number < len(faults) else ("raises", -1)
        async for event in stream(engine, attempt.request, TOKENIZER):
            if isinstance(event, Admitted):
                yield event
                continue
            if after == 0:
                if fault == "raises":
                    raise ConnectionError("the replica has died")
                if fault == "fails":
                    yield Failed("RuntimeError")
                if fault == "hangs":
                    skip(STALL)
                    await asyncio.Event().wait()
                return
            after -= 1
            yield event

    return send


def answer(request: Any, send: Send, **limits: Any) -> tuple[list[Event], list[str]]:
    """Return all events, and when the request was sent again."""
    events, retried = [], []

    async def run() -> None:
        config = GatewayConfig(**{"stall_seconds": STALL, **limits})
        named = replace(request, id=str(next(NUMBERS)))
        async for event in resumed(named, send, config, retried.append):
            events.append(event)

    clocks.run(run(), SkippingLoop)
    return events, retried


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.waiting == stats.decoding == stats.workspace_bytes == 0


@settings(max_examples=15)
@given(
    policy=st.sampled_from(POLICIES),
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 5),
    faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 25)), min_size=1, max_size=3),
    stop=st.sampled_from([(), ("Q",), ("à",), ("AB", "Z")]),
)
def test_the_client_cannot_tell_that_replicas_failed(engines, policy, temperature, seed, faults, stop):
    request = make_request(prompt(40, seed=seed), new=30, policy=policy, temperature=temperature, seed=seed, stop=stop)
    seen: list[Attempt] = []
    whole, _ = answer(request, cluster(engines, [], []))
    events, retried = answer(request, cluster(engines, faults, seen))
    assert text(events) == text(whole)
    assert events[-1] == whole[-1]
    assert [type(event) for event in events if not isinstance(event, Delta)] == [Admitted, Started, Finished]
    assert isinstance(events[1], Started)
    begun = next(number for number, fault in enumerate([*faults, ("", 1)]) if fault[1] > 0)  # who sent the Started
    assert events[1].replica == str(begun % REPLICAS)
    counts = [event.output_tokens for event in events if isinstance(event, Delta)]
    assert counts == sorted(counts)
    assert retried == ["waiting" if n < begun else "streaming" for n in range(len(seen) - 1)]
    assert len({attempt.request.id for attempt in seen}) == len(seen)


def test_a_replica_that_dies_between_the_last_text_and_the_end_changes_nothing(engines):
    request = make_request(prompt(40), new=12, stop=("no such text",))  # some text is held back until the end
    whole, _ = answer(request, cluster(engines, [], []))
    for after in range(1, len(whole) - 1):
        events, _ = answer(request, cluster(engines, [("ends", after)], []))
        assert (text(events), events[-1]) == (text(whole), whole[-1])


class Told(Link):
    """Keep the events of a link in a queue."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None, lambda link: None)
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    def send(self, stream: int, event: Event) -> None:
        self.events.put_nowait(event)


class NothingFetched:
    """Help no request by transfers between replicas."""

    def helps(self, request: GenerateRequest) -> bool:
        return False

    async def prepare(self, request: GenerateRequest) -> None: ...

    def started(self, request: GenerateRequest, started: Started) -> None: ...


@pytest.mark.parametrize("policy", ["full", "h2o@20"])
def test_an_answer_that_outlasts_the_drain_of_a_replica_that_stops_goes_on_elsewhere(engines, policy):
    """Stop the first of two replicas after some text, without time for the rest."""
    seen: list[Attempt] = []
    ended = threading.Event()

    def hold(engine: Engine) -> None:
        """Let an engine make 20 steps: it must not be faster than this test."""
        flush, steps = engine.flush, itertools.count(1)

        def flush_and_wait() -> None:
            flush()
            if next(steps) == 20:
                ended.wait(PATIENCE)

        engine.flush = flush_and_wait

    async def send(attempt: Attempt) -> AsyncGenerator[Event]:
        number = len(seen)
        seen.append(attempt)
        engine, link, draining = engines[number], Told(), None
        attempt.replica = engine.name
        answers = Answers(OutputProcessor(engine, TOKENIZER, BEAT), NothingFetched(), lambda: None, 1)
        if number == 0:
            hold(engine)
        answers.take(link, 0, attempt.request)

        async def stop() -> None:
            await answers.drain(0)
            await answers.give_up()

        try:
            while not isinstance(event := await link.events.get(), Finished):
                yield event
                if isinstance(event, Delta) and number == 0 and draining is None:
                    draining = asyncio.create_task(stop())
            yield event
        finally:
            ended.set()

    request = make_request(prompt(40), new=60, policy=policy)
    whole, _ = answer(request, cluster(engines, [], []))
    events, retried = answer(request, send, retries=1)
    assert (text(events), events[-1]) == (text(whole), whole[-1])
    assert [event.replica for event in events if isinstance(event, Started)] == ["0"]
    assert (len(seen), retried) == (2, ["streaming"])
    until(lambda: idle(engines[0]), "the first replica has freed it")


def test_what_was_given_up_is_told_to_the_next_attempt(engines):
    seen: list[Attempt] = []
    answer(make_request(prompt(20)), cluster(engines, [("raises", 0), ("hangs", 3)], seen))
    assert [attempt.given_up for attempt in seen] == [(), (seen[0],), (seen[0], seen[1])]
    assert seen[0].request.resume == seen[1].request.resume == ()
    assert len(seen[2].request.resume) > 0


def test_silence_is_a_fault_after_a_while():
    """A silence of STALL seconds, which is skipped: longer than one setting allows, not so long as the other."""
    for stall_seconds, retries in ((STALL / 2, 1), (2 * STALL, 0)):
        seen: list[Attempt] = []

        async def send(attempt: Attempt, seen: list[Attempt] = seen) -> AsyncGenerator[Event]:
            seen.append(attempt)
            attempt.replica = "a"
            yield Admitted()
            if len(seen) == 1:
                skip(STALL)
                for _ in range(20):
                    await asyncio.sleep(0)
            yield Finished("stop", 0)

        _, retried = answer(make_request(prompt(20)), send, stall_seconds=stall_seconds)
        assert len(retried) == retries


def test_after_so_many_retries_the_last_fault_is_raised(engines):
    seen: list[Attempt] = []
    with pytest.raises(ConnectionError):
        answer(make_request(prompt(20)), cluster(engines, [("raises", 2)] * 9, seen), retries=2)
    assert len(seen) == 3
    with pytest.raises(ReplicaFailedError, match="ended the answer early"):
        answer(make_request(prompt(20)), cluster(engines, [("ends", 2)], []), retries=0)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(QueueFullError("3 wait"), QueueFullError), (overloaded("gateway_queue"), ApiError)],
)
def test_for_want_of_room_nothing_is_sent_again(engines, error, raised):
    sent = []

    async def refuse(attempt: Attempt) -> AsyncGenerator[Event]:
        sent.append(attempt)
        raise error
        yield

    with pytest.raises(raised):
        answer(make_request(prompt(20)), refuse)
    assert len(sent) == 1


def refusing(engines: list[Engine], full: dict[int, float | None], outcomes: list[str]) -> Send:
    """Return attempts go to the replicas in turn; those in `full` have no room, for so many seconds."""
    sent = itertools.count()

    async def send(attempt: Attempt) -> AsyncGenerator[Event]:
        number = next(sent)
        attempt.replica, attempt.others = str(number), REPLICAS - number - 1
        attempt.ended = outcomes.append
        if number in full:
            raise QueueFullError("64 wait", 64, full[number])
        async for event in stream(engines[number], attempt.request, TOKENIZER):
            yield event

    return send


@pytest.mark.parametrize("full", [[], [0], [0, 1]])
def test_a_replica_that_is_full_is_passed_over_and_has_not_failed(engines, full):
    request, outcomes = make_request(prompt(20)), []
    whole, _ = answer(request, cluster(engines, [], []))
    events, retried = answer(request, refusing(engines, dict.fromkeys(full, 1.0), outcomes), retries=0)
    assert (text(events), events[-1]) == (text(whole), whole[-1])
    assert retried == ["full"] * len(full)
    assert outcomes == ["none"] * len(full) + ["ok"]


@pytest.mark.parametrize(
    ("seconds", "expected"), [([9.0, 2.5, 4.0], 2.5), ([None, None, 7.0], 7.0), ([None, None, None], None)]
)
def test_if_all_are_full_the_client_hears_when_the_first_has_room(engines, seconds, expected):
    with pytest.raises(QueueFullError) as caught:
        answer(make_request(prompt(20)), refusing(engines, dict(enumerate(seconds)), []))
    error = from_exception(caught.value)
    assert (error.type, error.retry_after) == ("overloaded_error", expected)


def told(events: list[Event], outcomes: list[str], sent: list[Attempt]) -> Send:
    """Send every attempt the same events."""

    async def send(attempt: Attempt) -> AsyncGenerator[Event]:
        sent.append(attempt)
        attempt.replica, attempt.ended = "a", outcomes.append
        for event in events:
            yield event

    return send


@pytest.mark.parametrize("begun", [0, 1])
def test_what_crashed_a_step_is_not_sent_again(begun):
    started = Started("a", 0, 0, 0, 20, 0, 0.0, 0.0)
    events: list[Event] = [*[started] * begun, Failed("ValueError", "request")]
    outcomes, sent = [], []
    with pytest.raises(RequestFailedError, match="ValueError") as caught:
        answer(make_request(prompt(20)), told(events, outcomes, sent))
    assert (len(sent), outcomes) == (1, ["none"])
    error = from_exception(caught.value)
    assert (error.type, error.final) == ("api_error", True)


def test_what_an_engine_refuses_is_the_client_s_error():
    outcomes, sent = [], []
    with pytest.raises(UnservableRequestError, match="too deep") as caught:
        answer(make_request(prompt(20)), told([Admitted(), Failed("too deep", "refused")], outcomes, sent))
    assert (len(sent), outcomes, from_exception(caught.value).status) == (1, ["none"], 400)


def test_every_fault_of_a_replica_is_told_to_its_breaker():
    outcomes: list[str] = []
    with pytest.raises(ReplicaFailedError):
        answer(make_request(prompt(20)), told([Failed("OutOfMemoryError")], outcomes, []), retries=2)
    assert outcomes == ["failed"] * 3


def test_what_a_replica_refuses_is_not_offered_to_another(engines):
    seen: list[Attempt] = []
    with pytest.raises(Exception, match="vocabulary"):
        answer(make_request([VOCABULARY]), cluster(engines, [], seen))
    assert len(seen) == 1


def test_a_client_that_leaves_is_no_fault_of_the_replica(engines):
    seen: list[Attempt] = []

    async def leave() -> None:
        events = resumed(make_request(prompt(20), new=400), cluster(engines, [], seen), GatewayConfig(), print)
        assert isinstance(await anext(events), Admitted)
        assert isinstance(await anext(events), Started)
        await events.aclose()

    asyncio.run(leave())
    assert len(seen) == 1
    until(lambda: idle(engines[0]))


def test_what_waits_to_be_sent_is_not_taken_for_a_fault(engines):
    """Count silence from when a replica has the attempt, here after none was there for a while."""
    seen: list[Attempt] = []
    sending: list[asyncio.Task[None]] = []
    send = cluster(engines, [], [])

    def later(attempt: Attempt) -> Mailbox:
        assert not seen, "it was sent again"
        seen.append(attempt)
        box = Mailbox(0, lambda box: None, attempt.take)

        async def waits(seconds: float) -> None:
            skip(seconds)
            for _ in range(5):
                await asyncio.sleep(0)

        async def sent() -> None:
            for _ in range(3):
                await waits(STALL)
            await waits(STALL * 0.9)
            attempt.replica = "0"
            await waits(STALL * 0.2)
            async for event in send(attempt):
                box.put(event)

        sending.append(asyncio.create_task(sent()))
        return box

    events, retried = answer(make_request(prompt(20)), later, retries=0)
    assert isinstance(events[-1], Finished)
    assert (len(seen), retried) == (1, [])


def test_the_router_hears_of_every_attempt_that_its_prompt_is_computed(engines):
    begun: list[int] = []
    seen: list[Attempt] = []
    send = cluster(engines, [("raises", 0), ("fails", 3)], [])

    async def counted(attempt: Attempt) -> AsyncGenerator[Event]:
        number = len(seen)
        seen.append(attempt)
        attempt.began = lambda cached: begun.append(number)
        async for event in send(attempt):
            yield event

    events, _ = answer(make_request(prompt(20)), counted, retries=3)
    assert isinstance(events[-1], Finished)
    assert (len(seen), begun) == (3, [1, 2])  # the first failed before


def test_a_replica_that_is_busy_with_others_gives_signs_of_life(engines):
    """One slot, taken by an answer of which nothing is decoded while the others wait."""
    settings = EngineConfig(kv_bytes=1 << 26, max_slots=1)
    engine = Engine(prepare(random_model("llama")), settings, PrefixCacheConfig(), clock=lambda: 0.0, name="busy")
    gate = threading.Event()

    async def run() -> list[Event]:
        events: list[Event] = []
        running = threading.Thread(target=engine.run)
        engine.call(gate.wait)  # the engine's thread stands still
        running.start()
        task = asyncio.create_task(collect(stream(engine, make_request(prompt(9)), TOKENIZER), events))
        for _ in range(50):
            skip(BEAT)
            await asyncio.sleep(0)  # the stream's turn
        assert sum(isinstance(event, Alive) for event in events) <= 1  # its last turn, at most
        before = len(events)
        gate.set()
        await task
        engine.stop()
        running.join()
        assert before <= 2  # Admitted, and that one
        return events

    assert isinstance(clocks.run(run(), SkippingLoop)[-1], Finished)


async def collect(events: AsyncGenerator[Event], into: list[Event]) -> None:
    async for event in events:
        into.append(event)

"""Streams from replicas to a gateway: one message a step, whatever dies; nothing lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray._common.tls_utils import generate_self_signed_tls_certs

from tests.engine_stream import BEAT
from tests.tokenizers import of_words
from tests.unit.platform.exchanges import Exchange, Gateway, chat, message, until
from tests.unit.platform.wires import Cluster, Wire, hello_to, ignore
from tests.unit.replicas.conftest import VOCABULARY, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import EngineConfig, GatewayConfig, PrefixCacheConfig
from warmkv.platform.gateway import replies as streams
from warmkv.platform.gateway.apis.answer import Answer
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.replies import Connection, Mailbox, Replies
from warmkv.platform.gateway.resume import Attempt, Sink, resumed
from warmkv.platform.gateway.streams import EventWriter
from warmkv.policies.pricing import Price
from warmkv.prefixes.misses import Finding
from warmkv.prefixes.usage import Usage
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.frames import Lines, decode, encode
from warmkv.replicas.links import Link, Links, ray_tls
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.protocol import (
    Admitted,
    Alive,
    Delta,
    Event,
    Failed,
    Finished,
    GatewayAddress,
    GenerateRequest,
    PromptLogprobs,
    Refused,
    Started,
    TokenLogprobs,
)

LETTERS = of_words([chr(0x4E00 + token) for token in range(VOCABULARY)])
LOGPROBS = st.lists(
    st.builds(
        TokenLogprobs,
        st.integers(0, 9),
        st.floats(-9, 0),
        st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=3).map(tuple),
    )
).map(tuple)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Admitted, st.integers(1, 9)),
    st.just(Alive()),
    st.builds(PromptLogprobs, LOGPROBS),
    st.builds(Started, st.text(), *[st.integers(0, 9)] * 5, st.floats(0, 9), st.floats(0, 9), st.just({"host": 3})),
    st.builds(Delta, st.text(), st.integers(0, 9), st.lists(st.integers(0, 9)).map(tuple), LOGPROBS),
    st.builds(Finished, st.sampled_from(["end", "stop"]), st.integers(0, 9), st.none() | st.text(), LOGPROBS),
    st.builds(Failed, st.text(), st.sampled_from(["replica", "request"])),
    st.builds(Refused, st.sampled_from(["busy", "full"]), st.text(), st.integers(0, 9), st.none() | st.floats(0, 9)),
)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 99), EVENTS), min_size=1), min_size=1, max_size=4),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_events_come_out_as_they_went_in_however_the_bytes_are_cut(messages, cuts):
    data, lines, came, at = b"".join(map(encode, messages)), Lines(), [], 0
    for size in itertools.cycle(cuts):
        came += [decode(line) for line in lines.feed(data[at : at + size])]
        at += size
        if at >= len(data):
            break
    assert came == messages


def test_a_line_without_an_end_is_refused():
    lines = Lines(longest=10)
    assert list(lines.feed(b"12345")) == []
    with pytest.raises(ValueError, match="10 bytes"):
        list(lines.feed(b"678901"))


def answer_of(request: GenerateRequest, started: Started, events: AsyncGenerator[Event], sink: Sink) -> Answer:
    return Answer(
        id=request.id,
        model="tiny",
        api="messages",
        tenant="",
        arrival=0.0,
        request=request,
        started=started,
        prompt_usage=Usage(input=0, read=0),
        price=lambda usage: cast(Price, None),
        clock=lambda: 0.0,
        begun=0.0,
        on_end=lambda answer, status: None,
        events=events,
        sink=sink,
        finding=Finding(0),
        places=(),
    )


async def written(answer: Answer, pauses: list[int]) -> list[Event]:
    """What a client reads of an answer, and the end; before every piece it pauses for so many turns of the loop."""
    turns, read = itertools.cycle(pauses), list[Event]()

    async def send(message: Any) -> None:
        for _ in range(next(turns)):
            await asyncio.sleep(0)
        read.append(Delta(message["body"].decode(), 0))

    out = EventWriter(send, b"", 1e9)
    await answer.write(out, str.encode)
    await out.drain()
    out.close()
    assert answer.output_tokens == answer.end.output_tokens
    return [*read, answer.end]


MOVES = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("deliver"), st.integers(0, 1), st.integers(1, 600)),
    st.tuples(st.just("cut"), st.integers(0, 1), st.just(0)),
)


@settings(max_examples=100)
@given(
    texts=st.lists(st.text("abcdef", max_size=12), min_size=1, max_size=4),
    moves=st.lists(st.tuples(MOVES, st.integers(0, 3)), max_size=60),
    pauses=st.none() | st.lists(st.integers(0, 3), min_size=1),
)
def test_no_token_is_lost_doubled_or_out_of_order(texts, moves, pauses):
    """Whatever dies, at whatever byte, and in whatever order it is heard of; and however slowly clients read.

    With `pauses`, turns of the loop in which a client does not read, text is written as it comes, else asked for.
    """

    async def ask(cluster: Cluster, text: str, heard: list[Event]) -> None:
        request = make_request([ord(letter) for letter in text] or [0], name=str(len(heard)))
        request = replace(request, token_ids=tuple(ord(letter) for letter in text))
        sink = Sink()
        events = resumed(request, cluster.sender.send, GatewayConfig(retries=1000), lambda when: None, sink=sink)
        async for event in events:
            heard.append(event)
            if isinstance(event, Started) and pauses is not None:
                heard += await written(answer_of(request, event, events, sink), pauses)
                return

    async def run() -> None:
        cluster = Cluster(2)
        heard: list[list[Event]] = [[] for _ in texts]
        asking = [asyncio.ensure_future(ask(cluster, text, into)) for text, into in zip(texts, heard, strict=True)]
        for (move, number, size), turns in moves:
            getattr(cluster.replicas[number], move)(size)
            for _ in range(turns):  # of the event loop: clients read, or not yet
                await asyncio.sleep(0)
        while not all(task.done() for task in asking):
            await asyncio.sleep(0)
            for replica in cluster.replicas:
                replica.step(2)
            await asyncio.sleep(0)
            for replica in cluster.replicas:
                replica.deliver(1 << 20)
        for text, events, task in zip(texts, heard, asking, strict=True):
            task.result()
            assert "".join(event.text for event in events if isinstance(event, Delta)) == text
            assert [type(event) for event in events if not isinstance(event, Delta)] == [Admitted, Started, Finished]
            assert events[-1] == Finished("end", len(text))
        while not cluster.idle:
            for replica in cluster.replicas:
                replica.deliver(1 << 20)
            await asyncio.sleep(0)
        cluster.replies.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warmkv.policies.breaker.RETRY_SECONDS", 0.0)
        asyncio.run(run())


async def over_sockets(
    scenario: Callable[[Replies, Links], Coroutine[Any, Any, None]], tls: tuple[ssl.SSLContext, ssl.SSLContext] | None
) -> None:
    replies, links = Replies("127.0.0.1"), Links("only", ignore, ignore, tls[1] if tls else None)
    await replies.listen(tls[0] if tls else None)
    try:
        await scenario(replies, links)
    finally:
        await links.close()
        replies.close()


def test_a_step_is_one_message_for_200_streams():
    """However many decode: one message a part of a step, and one turn of the loop for those that are admitted."""
    count, new = 200, 12
    config = EngineConfig(kv_bytes=1 << 28, max_slots=count, max_queue=count)
    engine = Engine(prepare(random_model("llama")), config, PrefixCacheConfig(enabled=False), clock=lambda: 0.0)
    parts, texts = 0, {}

    async def scenario(replies: Replies, links: Links) -> None:
        nonlocal parts
        outputs = OutputProcessor(engine, LETTERS, BEAT)
        flush = engine.flush

        def counted() -> None:
            nonlocal parts
            parts += bool(outputs._emitted)
            flush()

        engine.flush = counted
        mailboxes = [replies.mailbox(lambda closed: None) for _ in range(count)]
        link = await links.to(replies.address)
        for number, mailbox in enumerate(mailboxes):
            request = make_request(prompt(5, seed=number % 7), new=new, name=str(number))
            outputs.submit(request, lambda event, at=mailbox.stream: link.send(at, event))
        assert await links.to(replies.address) is link
        while engine.step():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for number, mailbox in enumerate(mailboxes):
            texts[number] = 0
            while not isinstance(event := await mailbox.__anext__(), Finished):
                texts[number] += len(event.tokens) if isinstance(event, Delta) else 0
        assert replies.messages <= parts + 1

    asyncio.run(over_sockets(scenario, None))
    assert set(texts.values()) == {new}
    assert parts <= 2 * (count + new)  # a step is a prompt's last chunk and a token of all others, at most


def test_a_cancelled_request_is_gone_within_a_step():
    engine = Engine(prepare(random_model("llama")), EngineConfig(), PrefixCacheConfig(), clock=lambda: 0.0)

    async def run() -> None:
        outputs = OutputProcessor(engine, LETTERS, BEAT)
        heard: list[Event] = []
        output = outputs.submit(make_request(prompt(9), new=400), heard.append)
        for _ in range(3):
            engine.step()
        assert engine.stats().decoding == 1
        outputs.cancel(output)
        engine.step()
        assert engine.stats().decoding == engine.stats().slots == 0
        before = len(heard)
        await asyncio.sleep(0)
        assert len(heard) == before

    asyncio.run(run())


def test_text_that_cannot_be_made_ends_one_answer():
    engine = Engine(prepare(random_model("llama")), EngineConfig(), PrefixCacheConfig(), clock=lambda: 0.0)

    def no_text(token: int) -> str:
        raise ValueError("no text")

    async def run() -> None:
        outputs = OutputProcessor(engine, LETTERS, BEAT)
        bad = outputs.submit(make_request(prompt(9), new=9, name="bad"), lambda event: None)
        bad.detokenizer.push = no_text  # type: ignore[method-assign]
        while not bad.ended.done():
            engine.step()
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="no text"):
            await bad.ended
        outputs.cancel(bad)
        good = outputs.submit(make_request(prompt(9), new=9, name="good"), lambda event: None)
        while not good.ended.done():
            engine.step()
            await asyncio.sleep(0)
        assert (await good.ended).output_tokens == 9  # type: ignore[union-attr]
        assert engine.stats().decoding == 0

    asyncio.run(run())


LOGPROB = TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.5)))


@pytest.mark.parametrize(("logprobs", "most"), [((), 100), ((LOGPROB,), 25 * (4 + 3 * streams.LOGPROB_CHARACTERS))])
def test_a_client_that_does_not_read_is_cut_off_and_holds_nobody(monkeypatch, logprobs, most):
    monkeypatch.setattr(streams, "MOST_UNREAD", most)

    async def run() -> None:
        replies, closed = Replies("127.0.0.1"), []
        slow, other = replies.mailbox(closed.append), replies.mailbox(closed.append)
        connection = Connection(replies)
        connection.connection_made(Wire())
        connection.data_received(hello_to(replies))
        for number in range(30):
            both = [(box.stream, Delta("text", number + 1, (number,), logprobs)) for box in (slow, other)]
            connection.data_received(encode(both))
            if number % 10 == 9:
                event = cast(Delta, await other.__anext__())
                assert (event.text, event.output_tokens) == ("text" * 10, number + 1)
                assert event.tokens == tuple(range(number - 9, number + 1))
                assert (event.logprobs, other._unread) == (logprobs * 10, 0)
            held = slow._unread if slow in replies.open.values() else 0
            assert held <= most
        assert closed == [slow]
        with pytest.raises(ApiError, match="did not read"):
            await slow.__anext__()
        replies.close()

    asyncio.run(run())


@pytest.mark.parametrize("hello", [b'{"key": "wrong"}\n', b"[]\n", b"GET / HTTP/1.1\r\n", b"x" * 2000, b'{"key": 7}\n'])
def test_who_does_not_know_the_key_is_not_heard(hello):
    async def run() -> None:
        replies = Replies("127.0.0.1")
        mailbox = replies.mailbox(lambda closed: None)
        connection, wire = Connection(replies), Wire()
        connection.connection_made(wire)
        connection.data_received(hello + encode([(mailbox.stream, Delta("forged", 1))]))
        assert wire.ended
        assert not mailbox._events
        replies.close()

    asyncio.run(run())


def test_a_gateway_that_cannot_be_reached_is_asked_again_by_the_next_request():
    async def scenario(replies: Replies, links: Links) -> None:
        gone = GatewayAddress("127.0.0.1", 1, replies.address.key)
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                await links.to(gone)
        first = await links.to(replies.address)
        first.close()
        await until(lambda: not links._opening)
        assert await links.to(replies.address) is not first

    asyncio.run(over_sockets(scenario, None))


@pytest.fixture
def certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[ssl.SSLContext, ssl.SSLContext]]:
    """Make a cluster's certificates, and return the contexts of a gateway and of a replica that were told of them."""

    def make(name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        certificate, key = generate_self_signed_tls_certs()
        paths = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        for path, text in zip(paths, (certificate, key), strict=True):
            path.write_text(text)
        named = {"RAY_TLS_SERVER_CERT": paths[0], "RAY_TLS_SERVER_KEY": paths[1], "RAY_TLS_CA_CERT": paths[0]}
        for variable, path in (named | {"RAY_USE_TLS": 1}).items():
            monkeypatch.setenv(variable, str(path))
        gateway, replica = ray_tls("server"), ray_tls("client")
        assert gateway is not None
        assert replica is not None
        return gateway, replica

    return make


def test_without_rays_tls_there_is_none(monkeypatch):
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert ray_tls("server") is ray_tls("client") is None


def test_tokens_travel_under_rays_certificates(certified):
    """Those of the cluster are taken; who has none, or another cluster's, is not heard."""
    cluster, others = certified("cluster"), certified("others")
    deltas = [Delta("text" * 5000, number, (number,)) for number in range(9)]  # longer than a record of TLS

    async def scenario(replies: Replies, links: Links) -> None:
        mailbox = replies.mailbox(lambda closed: None)
        for tls in (None, others[1]):
            lost: list[Link] = []
            strangers = Links("stranger", ignore, lost.append, tls)
            with contextlib.suppress(OSError):  # refused at once, or the connection is lost
                link = await strangers.to(replies.address)
                link.send(mailbox.stream, Delta("forged", 1))
                await until(lambda lost=lost: lost)
            await strangers.close()
        link = await links.to(replies.address)
        for delta in deltas:
            link.send(mailbox.stream, delta)
            await asyncio.sleep(0)
        text = ""
        while len(text) < 9 * 20_000:
            text += cast(Delta, await mailbox.__anext__()).text
        assert text == "text" * 45_000
        assert replies.messages == len(deltas)

    asyncio.run(over_sockets(scenario, cluster))


def test_a_token_costs_a_replica_a_few_calls():
    """Of warmkv's functions, from the engine's word of a step to the bytes of its message; nothing is awaited."""
    count, new = 16, 21
    engine = Engine(prepare(random_model("llama")), EngineConfig(), PrefixCacheConfig(enabled=False), clock=lambda: 0.0)
    called: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/warmkv/" in frame.f_code.co_filename:
            called.append(frame.f_code)

    async def run() -> None:
        outputs, link, wire = OutputProcessor(engine, LETTERS, 1e9), Link(ignore, ignore), Wire()
        link.connection_made(wire)
        for number in range(count):
            request = make_request(prompt(5, seed=number), new=new, name=str(number))
            outputs.submit(request, partial(link.send, number))
        while engine.stats().decoding < count:
            engine.step()
        for _ in range(3):  # first tokens are taken, and sent
            await asyncio.sleep(0)
        for _ in range(9):
            engine.step()
            sys.setprofile(note)
            await asyncio.sleep(0)  # what the engine's thread has left is taken
            await asyncio.sleep(0)  # and sent
            sys.setprofile(None)

    asyncio.run(run())
    tokens = 9 * count
    assert not [code.co_name for code in called if code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR)]
    assert len(called) / tokens <= 6.5, Counter(code.co_qualname for code in called)


class Fed:
    """A gateway whose replicas' messages the test writes itself, and the streams of its clients."""

    def __init__(self, folder: Path) -> None:
        self.gateway, self.replies = Gateway(folder), Replies("127.0.0.1")
        self.mailboxes: list[Mailbox] = []
        self._connection = Connection(self.replies)
        self._connection.connection_made(Wire())
        self._connection.data_received(hello_to(self.replies))
        self.gateway.service._send = self._send

    def _send(self, attempt: Attempt) -> Mailbox:
        self.mailboxes.append(self.replies.mailbox(lambda closed: None, attempt.take))
        return self.mailboxes[-1]

    def tell(self, event: Event) -> None:
        """Have a message come with an event of every answer."""
        self._connection.data_received(encode([(box.stream, event) for box in self.mailboxes]))

    async def begin(self, path: str, clients: int) -> list[Exchange]:
        """Return as many streams, each with its first token."""
        more = {"stream": True, "max_tokens": 64}
        body = message(self.gateway, **more) if "messages" in path else chat(self.gateway, **more)
        streams = [Exchange(self.gateway, path, body) for _ in range(clients)]
        await until(lambda: len(self.mailboxes) == clients)
        for event in (Admitted(), Started("a", 0, 0, 0, 0, 0, 0.0, 0.0), Delta("zq", 1, (0,))):
            self.tell(event)
        for stream in streams:
            await stream.until(lambda stream=stream: b"zq" in stream.body)
        return streams

    async def end(self, streams: list[Exchange], tokens: int) -> None:
        self.tell(Finished("end", tokens))
        for stream in streams:
            assert (await stream.whole()).status == 200
            assert stream.body.count(b"zq") == tokens
        self.replies.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_token_costs_a_gateway_a_few_calls_and_wakes_nobody(tmp_path, path):
    """From the bytes of a message to every client: no turn of the event loop, and no coroutine but ASGI's `send`."""
    clients, tokens = 16, 21
    called: list[CodeType] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/warmkv/" in frame.f_code.co_filename:
            called.append(frame.f_code)

    async def run() -> None:
        fed = Fed(tmp_path)
        streams = await fed.begin(path, clients)
        for number in range(1, tokens):
            sys.setprofile(count)
            fed.tell(Delta("zq", number + 1, (number,)))
            sys.setprofile(None)
            assert all(stream.body.count(b"zq") == number + 1 for stream in streams)
        await fed.end(streams, tokens)

    asyncio.run(run())
    each = clients * (tokens - 1)
    awaits = [code.co_name for code in called if code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR)]
    assert len(awaits) == 2 * each, Counter(awaits)  # the middleware that adds headers
    assert len(called) / each <= 12, Counter(code.co_qualname for code in called)


def test_a_token_costs_a_gateway_little_memory_and_leaves_none(tmp_path):
    """Bytes that a message of 64 tokens has allocated at most at a time, and those that are left of it."""
    clients, tokens = 64, 12
    most: list[float] = []
    left: list[float] = []

    async def run() -> None:
        fed = Fed(tmp_path)
        streams = await fed.begin("/v1/messages", clients)
        for stream in streams:
            stream.discards = True
        tracemalloc.start()
        for number in range(1, tokens):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            fed.tell(Delta("zq", number + 1, (number,)))
            after, peak = tracemalloc.get_traced_memory()
            if number > 3:  # lists have grown
                most.append((peak - before) / clients)
                left.append((after - before) / clients)
        tracemalloc.stop()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(run())
    assert median(most) <= 900, most  # threads of other tests may allocate beside one of them
    assert median(left) <= 64, left

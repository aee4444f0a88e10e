"""Streams from the admission of a request on: pings, errors before and after it, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from tests.clocks import SkippingLoop, run, skip
from tests.unit.platform.exchanges import Exchange, Gateway, chat, message, until
from warmkv.platform.gateway import endpoints
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.gateway.streams import LATE_SECONDS, EventStream, EventWriter
from warmkv.replicas.protocol import Delta, Event, QueueFullError, UnservableRequestError


@pytest.fixture
def fast_pings(monkeypatch):
    monkeypatch.setattr(endpoints, "PING_SECONDS", 0.01)


def bodies(gateway: Gateway, **more: Any) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Return a streamed request of every API, and the ping that its clients skip."""
    comment = b": ping\n\n"
    text = {"model": gateway.config.model.name, "prompt": "hello", **more}
    return {
        "/v1/messages": (message(gateway, stream=True, **more), b'event: ping\ndata: {"type": "ping"}\n\n'),
        "/v1/chat/completions": (chat(gateway, stream=True, **more), comment),
        "/v1/completions": ({**text, "stream": True}, comment),
    }


APIS = ["/v1/messages", "/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("path", APIS)
def test_a_stream_opens_at_admission_and_pings_until_the_first_token(monkeypatch, tmp_path, path):
    async def run() -> None:
        gateway = Gateway(tmp_path)
        body, ping = bodies(gateway)[path]
        undisturbed = await Exchange(Gateway(tmp_path), path, body).whole()
        monkeypatch.setattr(endpoints, "PING_SECONDS", 0.01)
        gateway.first_token.clear()
        exchange = Exchange(gateway, path, body)
        await exchange.until(lambda: exchange.body.count(ping) >= 2)
        assert (exchange.status, exchange.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert exchange.body.replace(ping, b"") == b""
        gateway.first_token.set()
        await exchange.whole()
        assert ping not in undisturbed.body
        assert kinds(exchange.body.replace(ping, b"")) == kinds(undisturbed.body)
        assert gateway.statuses() == ["ok"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        ("/v1/messages", (b"content_block_stop", b"message_delta", b"message_stop")),
        ("/v1/chat/completions", (b'"finish_reason": "', b"total_tokens", b"[DONE]")),
        ("/v1/completions", (b'"finish_reason": "', b"total_tokens", b"[DONE]")),
    ],
)
def test_all_that_ends_a_stream_is_one_write(tmp_path, path, ending):
    async def run() -> None:
        gateway = Gateway(tmp_path)
        usage = {} if path == "/v1/messages" else {"stream_options": {"include_usage": True}}
        exchange = await Exchange(gateway, path, {**bodies(gateway)[path][0], **usage}).whole()
        assert all(part in exchange.pieces[-1] for part in ending)
        assert not any(part in piece for part in ending for piece in exchange.pieces[:-1])

    asyncio.run(run())


def kinds(body: bytes) -> list[str]:
    """Return the kinds of a stream's events, in order."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    found = [json.loads(line) for line in lines if line != b"[DONE]"]
    return [event.get("type") or str(sorted(event["choices"][0])) for event in found]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("fault", "status", "retry_after"),
    [(QueueFullError("full"), 529, "1"), (UnservableRequestError("too large"), 400, None)],
)
def test_what_is_refused_before_admission_has_a_status(fast_pings, tmp_path, path, fault, status, retry_after):
    async def run() -> None:
        gateway = Gateway(tmp_path)
        gateway.fault = fault
        exchange = await Exchange(gateway, path, bodies(gateway)[path][0]).whole()
        assert exchange.status == status
        assert exchange.headers.get("retry-after") == retry_after
        assert exchange.json["error"]["message"]
        assert gateway.statuses() == ["error"]
        assert gateway.service.backlog.waiting == len(gateway.service._writers) == 0

    asyncio.run(run())


def test_a_replica_says_when_its_queue_will_have_room(tmp_path):
    async def run() -> None:
        gateway = Gateway(tmp_path)
        gateway.fault = QueueFullError("full")
        gateway.fault.retry_after = 6.2
        exchange = await Exchange(gateway, "/v1/messages", message(gateway)).whole()
        assert exchange.headers["retry-after"] == "7"

    asyncio.run(run())


def test_a_refusal_names_the_time_that_the_queue_needs(tmp_path):
    """Three wait, and one request was served in ten seconds."""

    async def run() -> None:
        now = [1000.0]
        gateway = Gateway(tmp_path, clock=lambda: now[0])
        gateway.first_token.clear()
        first = Exchange(gateway, "/v1/messages", message(gateway))
        await until(lambda: gateway.admitted == 1)
        now[0] += 10
        gateway.first_token.set()
        assert (await first.whole()).status == 200
        gateway.first_token.clear()
        waiting = [Exchange(gateway, "/v1/messages", message(gateway)) for _ in range(3)]
        await until(lambda: gateway.admitted == 4)
        gateway.fault = QueueFullError("full")
        refused = await Exchange(gateway, "/v1/messages", message(gateway)).whole()
        assert refused.headers["retry-after"] == "30"
        gateway.first_token.set()
        for exchange in waiting:
            assert (await exchange.whole()).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("path", APIS)
def test_an_error_after_admission_is_an_event(fast_pings, tmp_path, path):
    async def scenario() -> None:
        gateway = Gateway(tmp_path)
        gateway.first_token.clear()
        body = bodies(gateway)[path][0]
        for number, stream in enumerate((True, False), 1):
            exchange = Exchange(gateway, path, {**body, "stream": stream})
            await until(lambda number=number: gateway.admitted == number)
            skip(gateway.config.gateway.request_timeout_seconds)
            await exchange.whole()
            assert exchange.status == (200 if stream else 504)
            error = json.loads(exchange.body.rpartition(b"data: ")[2])
            assert error["error"]["type"] == "timeout_error"
        assert gateway.statuses() == ["error", "error"]
        assert [record.status for record in gateway.records] == ["error", "error"]

    run(scenario(), SkippingLoop)


@pytest.mark.parametrize("path", APIS)
def test_a_client_that_leaves_before_the_first_token_is_counted_once(fast_pings, tmp_path, path):
    async def run() -> None:
        gateway = Gateway(tmp_path)
        gateway.first_token.clear()
        body, ping = bodies(gateway)[path]
        exchange = Exchange(gateway, path, body)
        await exchange.until(lambda: ping in exchange.body)
        assert gateway.service.backlog.waiting == 1
        exchange.leave()
        await exchange.whole()
        assert gateway.statuses() == ["cancelled"]
        assert gateway.service.backlog.waiting == len(gateway.service._writers) == 0

    asyncio.run(run())


@pytest.mark.parametrize("path", APIS)
def test_a_client_that_stops_reading_is_given_up_at_the_deadline(tmp_path, path):
    """Free its place then, count it and write it down, although its server never says that it has left."""

    async def scenario() -> None:
        gateway = Gateway(tmp_path, "gateway.limits.concurrent_requests=1")

        async def answer(attempt: Attempt) -> AsyncGenerator[Event]:
            async for event in gateway.answer(attempt):
                yield event
                if isinstance(event, Delta):
                    yield Delta("more", 2, (8,))

        gateway.service._send = answer
        gateway.first_token.clear()
        exchange = Exchange(gateway, path, bodies(gateway)[path][0])
        await exchange.until(lambda: exchange.status)
        exchange.reads.clear()
        gateway.first_token.set()
        await until(lambda: not gateway.service.backlog.waiting)
        skip(gateway.config.gateway.request_timeout_seconds)
        for _ in range(9):
            await asyncio.sleep(0)
        assert not exchange.task.done()
        skip(LATE_SECONDS)
        await exchange.whole()
        assert gateway.statuses() == ["cancelled"]
        assert [record.status for record in gateway.records] == ["cancelled"]
        assert (await Exchange(gateway, path, bodies(gateway)[path][0]).whole()).status == 200

    run(scenario(), SkippingLoop)


SCOPE = {"type": "http"}


class Source:
    def __init__(self, deadline: float = 1e9) -> None:
        self.closed, self.deadline = False, deadline

    async def aclose(self) -> None:
        self.closed = True


class Client:
    """Reads what it is sent, as long as it `reads`; may leave."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.reads, self.leaves = asyncio.Event(), asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.seen.append(message.get("body", b"start"))

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def test_a_stream_whose_client_is_gone_closes_its_source():
    async def write(out: EventWriter) -> None:
        raise AssertionError("never asked for")

    async def gone(_: Any) -> None:
        raise ConnectionResetError

    async def run() -> None:
        source = Source()
        with pytest.raises(ClientDisconnect):
            await EventStream(write, source, b"", 60)(SCOPE, Client().receive, gone)
        assert source.closed

    asyncio.run(run())


def test_pings_fill_silences_and_change_nothing():
    async def scenario() -> None:
        async def write(out: EventWriter) -> None:
            await out.send(b"a")
            await asyncio.sleep(35)
            await out.send(b"b")
            for _ in range(9):
                await asyncio.sleep(3)
                await out.send(b"c")

        client = Client()
        await EventStream(write, Source(), b"ping", 10)(SCOPE, client.receive, client.send)
        assert client.seen == [b"start", b"a", b"ping", b"ping", b"ping", b"b", *[b"c"] * 9, b""]

    run(scenario())


@pytest.mark.parametrize("error", [OSError("the connection is closed"), TimeoutError("no answer to what was sent")])
def test_a_client_whose_going_only_a_ping_tells_is_waited_for_no_longer(error):
    async def scenario() -> None:
        source, closed = Source(), []

        async def write(out: EventWriter) -> None:
            try:
                await out.send(b"a")
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        async def send(message: Any) -> None:
            if message.get("body") == b"ping":
                raise error

        with pytest.raises(ClientDisconnect):
            await EventStream(write, source, b"ping", 10)(SCOPE, Client().receive, send)
        assert closed == [True]
        assert source.closed

    run(scenario())


def test_a_client_that_reads_too_slowly_gets_all_in_order_and_no_ping_meanwhile():
    """What is written while it reads is there at once; where it does not, `send` waits, and `is_behind` says so."""

    async def scenario() -> None:
        client = Client()

        async def write(out: EventWriter) -> None:
            out.write(b"a")
            assert client.seen == [b"start", b"a"]
            client.reads.clear()
            out.write(b"b")
            assert out.is_behind
            asyncio.get_running_loop().call_later(35, client.reads.set)
            await out.send(b"c")
            assert not out.is_behind
            out.write(b"d")

        await EventStream(write, Source(), b"ping", 10)(SCOPE, client.receive, client.send)
        assert client.seen == [b"start", b"a", b"b", b"c", b"d", b""]

    run(scenario())


@pytest.mark.parametrize("reads_head", [True, False])
def test_what_is_not_read_by_the_deadline_is_given_up(reads_head):
    async def scenario() -> None:
        client, source = Client(), Source(100.0)

        async def write(out: EventWriter) -> None:
            client.reads.clear()
            await out.send(b"a")
            await out.send(b"b")

        if not reads_head:  # of an answer behind another one on the same connection
            client.reads.clear()
        await EventStream(write, source, b"ping", 10)(SCOPE, client.receive, client.send)
        assert asyncio.get_running_loop().time() == 100.0 + LATE_SECONDS
        assert (client.seen, source.closed) == ([b"start"] if reads_head else [], True)

    run(scenario())


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_leaves_ends_the_writing(reads):
    async def scenario() -> None:
        client, source, ended = Client(), Source(), []

        async def write(out: EventWriter) -> None:
            try:
                if not reads:
                    client.reads.clear()
                for _ in range(3):
                    await out.send(b"a")
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        asyncio.get_running_loop().call_later(1, client.leaves.set)
        await EventStream(write, source, b"ping", 10)(SCOPE, client.receive, client.send)
        assert (ended, source.closed) == ([True], True)
        assert client.seen == [b"start", *[b"a"] * (3 if reads else 0)]

    run(scenario())

"""The proxy: bytes pass as they are, at the pace of both sides, and whatever happens to its log."""

import asyncio
import contextlib
import json

import pytest

from tests.polling import PATIENCE
from warmkv.platform.access_log import AccessLog
from warmkv.platform.recording import proxy as module
from warmkv.platform.recording.exchange import Analyst
from warmkv.platform.recording.proxy import Proxy, Recorder
from warmkv.platform.recording.state import State
from warmkv.prefixes.record import RequestRecord

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
USAGE = b'{"usage": {"input_tokens": 9, "output_tokens": 2}}'


def request(body=BODY, path="/v1/messages", method="POST", headers=""):
    head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nX-Api-Key: k\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer(body=USAGE, headers=""):
    return f"HTTP/1.1 200 Fine\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Upstream:
    """A server of raw bytes: `serve` gets each connection's reader and writer, and its request's head and body."""

    def __init__(self, serve=None):
        self._serve, self.requests = serve, []

    async def handle(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lower = head.lower()
                body = b""
                if b"content-length:" in lower:
                    body = await reader.readexactly(int(lower.split(b"content-length:")[1].split(b"\r\n")[0]))
                elif b"transfer-encoding: chunked" in lower:
                    body = await reader.readuntil(b"0\r\n\r\n")
                self.requests.append((head, body))
                if self._serve is None:
                    writer.write(answer())
                else:
                    await self._serve(reader, writer)
        writer.close()


@contextlib.asynccontextmanager
async def recording(tmp_path, upstream):
    """Yield the port of a proxy, its recorder, and a function that ends the log and returns its records."""
    server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    recorder = None
    log = AccessLog(tmp_path / "log", 0, lambda lines: recorder.lost(lines))
    recorder = Recorder(log, Analyst(State(b"salt"), 64))
    closed = False

    def records():
        nonlocal closed
        if not closed:
            log.close()
            closed = True
        return [RequestRecord.from_json(line) for line in (tmp_path / "log").read_text().splitlines()]

    async with Proxy(address, recorder).running("127.0.0.1", 0) as port:
        yield port, recorder, records
    records()
    server.close()


async def asked(port, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    return reader, writer, head


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def test_bytes_pass_as_they_are_but_for_hop_by_hop_headers(tmp_path):
    async def serve(reader, writer):
        headers = "X-CASE: Kept\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nKeep-Alive: timeout=5\r\nrequest-id: r1\r\n"
        writer.write(answer(USAGE + b"\x00\xff", headers))

    async def scene():
        upstream = Upstream(serve)
        async with recording(tmp_path, upstream) as (port, _, records):
            odd = "ANTHROPIC-beta: a,b\r\nX-Title: Café\r\n"
            odd += "X-Hop: mine\r\nConnection: keep-alive, x-hop\r\nAccept-Encoding: br;q=0.5\r\n"
            path = "/v1/messages?beta=true&q=%7Ea%2Fb+c"
            reader, writer, head = await asked(port, request(path=path, headers=odd))
            body = await reader.readexactly(len(USAGE) + 2)
            writer.close()
            ((sent, sent_body),) = upstream.requests
        lines = sent.decode().split("\r\n")
        assert lines[0] == f"POST {path} HTTP/1.1"
        kept = {
            "X-Api-Key: k",
            "ANTHROPIC-beta: a,b",
            "X-Title: Café",
            "Accept-Encoding: br;q=0.5",
            f"Content-Length: {len(BODY)}",
        }
        assert {line for line in lines[1:] if line and not line.lower().startswith("host:")} == kept
        assert (sent_body, body) == (BODY, USAGE + b"\x00\xff")
        status, *headers = head.decode().strip().split("\r\n")
        assert status == "HTTP/1.1 200 Fine"
        assert sorted(headers) == sorted(
            ["X-CASE: Kept", "Set-Cookie: a=1", "Set-Cookie: b=2", "request-id: r1", f"Content-Length: {len(body)}"]
        )
        assert [record.id for record in records()] == ["r1"]

    run(scene())


def test_a_client_that_waits_to_be_told_to_go_on_is_told_so(tmp_path):
    """Tell it by the proxy, since an upstream that tells nobody would keep both sides waiting."""

    async def scene():
        upstream = Upstream()
        async with recording(tmp_path, upstream) as (port, _, records):
            head, body = request(headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
            reader, writer, told = await asked(port, head + b"\r\n\r\n")
            writer.write(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
            ((sent, sent_body),) = upstream.requests
        assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (sent_body, b"expect" in sent.lower()) == (BODY, False)
        assert len(records()) == 1

    run(scene())


def test_events_of_a_stream_come_when_they_are_sent(tmp_path):
    heard = asyncio.Event()

    async def serve(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await heard.wait()  # the second event comes only when the first was heard
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    async def scene():
        async with recording(tmp_path, Upstream(serve)) as (port, _, records):
            reader, writer, _ = await asked(port, request())
            assert await reader.readexactly(14) == b"9\r\ndata: 1\n\n\r\n"
            heard.set()
            assert await reader.readuntil(b"0\r\n\r\n") == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
            writer.close()
        (record,) = records()
        assert 0 < record.ttft <= record.e2e

    run(scene())


def test_a_client_that_leaves_cancels_upstream(tmp_path):
    gone = asyncio.Event()

    async def serve(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        assert await reader.read() == b""
        gone.set()

    async def scene():
        async with recording(tmp_path, Upstream(serve)) as (port, _, records):
            reader, writer, _ = await asked(port, request())
            await reader.readexactly(6)
            writer.close()
            await gone.wait()
        assert [record.status for record in records()] == ["cancelled"]

    run(scene())


def test_an_answer_that_upstream_cuts_off_is_cut_off(tmp_path):
    async def serve(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await writer.drain()
        writer.transport.abort()

    async def scene():
        async with recording(tmp_path, Upstream(serve)) as (port, _, records):
            reader, _, _ = await asked(port, request())
            with contextlib.suppress(ConnectionError):
                assert b"0\r\n\r\n" not in await reader.read()
        assert [record.status for record in records()] == ["error"]

    run(scene())


def test_a_slow_reader_slows_upstream(tmp_path):
    """Upstream's bytes are not taken faster than the client takes them: buffers are filled, no more."""
    sent, blocked, total = 0, asyncio.Event(), 64 << 20

    async def serve(reader, writer):
        nonlocal sent
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {total}\r\n\r\n".encode())
        while sent < total:
            writer.write(b"x" * (1 << 16))
            sent += 1 << 16
            await asyncio.sleep(0)  # the proxy reads what it can
            if writer.transport.get_write_buffer_size() > 1 << 20 or sent == total:
                blocked.set()
                await writer.drain()

    async def scene():
        async with recording(tmp_path, Upstream(serve)) as (port, _, _):
            reader, writer, _ = await asked(port, request(path="/files", method="GET"))
            await blocked.wait()
            assert sent < total
            while sent < total:
                await reader.read(1 << 20)
            writer.close()

    run(scene())


def test_errors_pass_and_an_upstream_that_is_away_is_a_bad_gateway(tmp_path):
    async def serve(reader, writer):
        body = b'{"type": "error", "error": {"type": "rate_limit_error"}}'
        writer.write(f"HTTP/1.1 429 Slow\r\nretry-after: 7\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async def scene():
        async with recording(tmp_path, Upstream(serve)) as (port, _, records):
            _, writer, head = await asked(port, request())
            assert head.startswith(b"HTTP/1.1 429 Slow\r\nretry-after: 7")
            writer.close()
        assert [(record.status, record.error) for record in records()] == [("error", "rate_limit_error")]
        recorder = Recorder(AccessLog(tmp_path / "other", 0), Analyst(State(b""), 64))
        async with Proxy("http://127.0.0.1:9", recorder).running("127.0.0.1", 0) as port:
            _, writer, head = await asked(port, request())
            assert head.startswith(b"HTTP/1.1 502")
            writer.close()

    run(scene())


def test_other_requests_pass_and_are_not_written(tmp_path):
    async def scene():
        upstream = Upstream()
        async with recording(tmp_path, upstream) as (port, recorder, records):
            reader, writer, _ = await asked(port, request(b"", "/v1/models", "GET"))
            await reader.readexactly(len(USAGE))
            writer.write(b"POST /v1/messages/count_tokens HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"2\r\n{}\r\n0\r\n\r\n")
            await reader.readuntil(USAGE)
            writer.close()
        assert records() == []
        assert upstream.requests[1][1] == b"2\r\n{}\r\n0\r\n\r\n"
        assert recorder.figures == {"passed": 2, "recorded": 0, "left_out": 0}

    run(scene())


def test_an_encoded_path_is_sent_as_it_came_and_written(tmp_path):
    async def scene():
        upstream, path = Upstream(), "/v1/m%65ssages?beta=true"
        async with recording(tmp_path, upstream) as (port, _, records):
            reader, writer, _ = await asked(port, request(path=path))
            await reader.readexactly(len(USAGE))
            writer.close()
        assert upstream.requests[0][0].startswith(f"POST {path} ".encode())
        assert [record.api for record in records()] == ["messages"]

    run(scene())


@pytest.mark.parametrize("limit", ["LONGEST_BODY", "MOST_KEPT", "MOST_WAITING"])
def test_what_is_too_large_for_the_log_passes_all_the_same(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(module, limit, 0 if limit == "MOST_WAITING" else len(BODY) + len(USAGE) - 1)
    monkeypatch.setattr(module, "LONGEST_BODY", len(BODY) - 1) if limit == "LONGEST_BODY" else None

    async def scene():
        async with recording(tmp_path, Upstream()) as (port, recorder, records):
            reader, writer, _ = await asked(port, request())
            assert await reader.readexactly(len(USAGE)) == USAGE
            writer.close()
        assert records() == []
        assert recorder.figures == {"passed": 1, "recorded": 0, "left_out": 1}
        assert recorder._kept == 0

    run(scene())


def test_no_fault_of_the_log_reaches_a_client(tmp_path, monkeypatch):
    monkeypatch.setattr("warmkv.platform.access_log.os.write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))

    async def scene():
        async with recording(tmp_path, Upstream()) as (port, recorder, records):
            for body in (b"no json", BODY):
                reader, writer, head = await asked(port, request(body))
                assert head.startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(len(USAGE)) == USAGE
                writer.close()
        assert records() == []
        assert recorder.figures == {"passed": 2, "recorded": 0, "left_out": 2}

    run(scene())

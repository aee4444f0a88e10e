"""Connections are bounded before anybody's key is known, and nothing that clients do is in their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.clocks import SkippingLoop, run, skip
from tests.unit.platform.exchanges import until
from tests.unit.platform.gateway.test_http_server import HOST, App, close, server
from warmkv.platform.gateway import connections
from warmkv.platform.gateway.connections import HEAD_BYTES, HEAD_SECONDS
from warmkv.platform.local import free_port

GET = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: test\r\n"


def scenario(scene: Callable[[App, int], Awaitable[None]]) -> None:
    async def serve() -> None:
        port = free_port(HOST)
        assert port is not None
        own = server(app := App(), port)
        await own.follow({"ours": "/"})
        await scene(app, port)
        await close(own)

    run(serve(), SkippingLoop)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the end of a connection, however it ends."""
    found = b""
    try:
        while part := await reader.read(1 << 16):
            found += part
    except ConnectionResetError:  # of a client that had more to send
        pass
    return found


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"x" * 1024),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 200),
        (b"GET /", b"x" * 1024),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 200),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"x" * 1024),
    ],
    ids=["a value", "headers", "a path", "trailers", "an extension"],
)
def test_a_head_without_end_is_refused(begin, more):
    async def scene(app: App, port: int) -> None:
        app.gate.clear()
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(begin)
        ending = asyncio.ensure_future(ended(reader))
        sent = 0
        while not ending.done():
            writer.write(more)
            sent += len(more)
            assert sent < 64 * HEAD_BYTES  # more than is on its way
            await asyncio.sleep(0.001)
        assert (await ending)[:12] in (b"HTTP/1.1 431", b"")
        writer.close()
        app.gate.set()

    scenario(scene)


def test_a_whole_head_is_refused_by_its_headers():
    async def scene(_: App, port: int) -> None:
        for size, status in ((HEAD_BYTES - 100, b"200"), (HEAD_BYTES, b"431")):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(GET[:-2] + b"connection: close\r\nx: " + b"x" * size + b"\r\n\r\n")
            assert (await ended(reader)).split()[1] == status
            writer.close()

    scenario(scene)


def test_a_head_must_come_in_time_and_a_body_or_an_answer_need_not():
    async def scene(app: App, port: int) -> None:
        app.gate.clear()
        streams = []
        for begin in (b"", GET[:-2], GET, POST + b"content-length: 2\r\n\r\na", GET[:-2] + b"x: "):
            streams.append(await asyncio.open_connection(HOST, port))
            streams[-1][1].write(begin)
        (silent, _), (half, _), (answered, _), (body, sends), (late, ends) = streams
        await until(lambda: app.asked == 2)
        skip(HEAD_SECONDS - 1)
        ends.write(b"x\r\n\r\n")
        await until(lambda: app.asked == 3)
        skip(2)
        assert await silent.read() == await half.read() == b""
        sends.write(b"b")
        app.gate.set()
        for reader in (answered, body, late):
            assert (await reader.readuntil(b"below ")).startswith(b"HTTP/1.1 200")
        for _, writer in streams:
            writer.close()

    scenario(scene)


def test_a_later_head_must_come_in_time_too():
    async def scene(_: App, port: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        for _ in range(2):
            writer.write(GET)
            await reader.readuntil(b"below ")
        writer.write(b"\r\n")  # which stops the timer that uvicorn has for idle connections
        for part in (b"GET / HTTP/1.1\r\n", b"a: b\r\n"):
            writer.write(part)
            await asyncio.sleep(0.05)
            skip(HEAD_SECONDS * 0.7)
        assert await reader.read() == b""
        writer.close()

    scenario(scene)


def test_connections_beyond_a_share_of_the_open_files_are_closed(monkeypatch):
    async def scene(_: App, port: int) -> None:
        monkeypatch.setattr(connections, "most_connections", lambda: 2)
        open_ones = [await asyncio.open_connection(HOST, port) for _ in range(3)]
        assert await ended(open_ones[2][0]) == b""
        for reader, writer in open_ones[:2]:
            writer.write(GET)
            await reader.readuntil(b"below ")
            writer.close()

    scenario(scene)


@pytest.mark.parametrize(("files", "most"), [(1024, 512), (-1, (1 << 32) - 1)])
def test_half_of_the_files_are_for_connections(monkeypatch, files, most):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (files, files))
    assert connections.most_connections() == most

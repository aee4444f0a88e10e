"""The gateway's own HTTP server: which paths it answers, beside whom it listens, and that it closes without a loss."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse

from tests.polling import PATIENCE
from tests.unit.platform.exchanges import Gateway, until
from warmkv.platform.drain import CONNECTION_SECONDS, IDLE_SECONDS
from warmkv.platform.gateway import http_server
from warmkv.platform.gateway.http_server import ConnectionAges, HttpServer, Paths, own_address
from warmkv.platform.local import free_port
from warmkv.platform.tenants import hash_key

HOST = "127.0.0.1"


class App:
    """Answers with its name and path, when its gate is open."""

    def __init__(self, name: str = "app") -> None:
        self.name, self.gate, self.asked, self.left = name, asyncio.Event(), 0, 0
        self.gate.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        status = 404 if scope["path"] == "/missing" else 200
        text = f"{self.name} {scope['path']} below {scope['root_path']}"
        await PlainTextResponse(text, status)(scope, receive, send)


def server(app: Any, port: int, *, shared: bool = False) -> HttpServer:
    return HttpServer(Paths(app, "ours"), "ours", HTTPOptions(host=HOST, port=port), shared=shared)


async def close(own: HttpServer) -> None:
    """Close a server that has all the time that its answers take."""
    await own.close(PATIENCE, lambda: pytest.fail("nothing is to be given up"))


async def ask(port: int, *paths: str) -> list[tuple[int, str]]:
    """Return status and body of some requests that are sent at once over one connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    for path in paths:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
    found = []
    for _ in paths:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        found.append((int(head.split()[1]), (await reader.readexactly(length)).decode()))
    writer.close()
    return found


def scenario(run: Callable[[int], Awaitable[None]]) -> None:
    asyncio.run(run(free_port(HOST)))  # type: ignore[arg-type]


def test_paths_are_those_of_serves_proxy():
    async def run(port: int) -> None:
        own = server(App(), port)
        await own.follow({"ours": "/"})
        assert await ask(port, "/v1/models", "/-/healthz", "/-/routes") == [
            (200, "app /v1/models below "),
            (200, "success"),
            (200, '{"/":"ours"}'),
        ]
        await own.follow({"ours": "/b"})
        assert await ask(port, "/b/v1", "/b", "/bc", "/v1", "/-/healthz") == [
            (200, "app /b/v1 below /b"),
            (200, "app /b below /b"),
            (404, "Path '/bc' not found. See /-/routes."),
            (404, "Path '/v1' not found. See /-/routes."),
            (200, "success"),
        ]
        await close(own)

    scenario(run)


def test_the_gateways_application_is_served_below_its_prefix(tmp_path):
    async def run(port: int) -> None:
        tenant = f"gateway.tenants=[{{name: a, key_sha256: '{hash_key('key')}'}}]"
        own = server(Gateway(tmp_path, tenant).app, port)
        await own.follow({"ours": "/b"})
        (health, models) = await ask(port, "/b/healthz", "/b/v1/models")
        assert (health[0], models[0]) == (200, 401)  # the one is public
        assert json.loads(models[1])["error"]["type"] == "authentication_error"
        await close(own)

    scenario(run)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_client_that_leaves_cancels_its_request(pieces):
    """Once its body has been read; what reads it hears of that itself."""

    class Reading(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            await super().__call__(scope, receive, send)

    async def run(port: int) -> None:
        app = Reading()
        own = server(app, port)
        await own.follow({"ours": "/"})
        app.gate.clear()
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(f"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: {4 * pieces}\r\n\r\n".encode())
        for _ in range(pieces):
            assert not app.asked
            writer.write(b"body")
            await asyncio.sleep(0)
        await until(lambda: app.asked)
        writer.close()
        await until(lambda: app.left)
        app.gate.set()
        assert await ask(port, "/", "/") == [(200, "app / below ")] * 2
        assert app.left == 1
        await close(own)

    scenario(run)


def test_a_request_whose_answer_is_whole_is_not_cancelled():
    """A server says then that the client is gone, too."""
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await PlainTextResponse("whole")(scope, receive, send)
        for _ in range(9):
            await asyncio.sleep(0)
        assert (await receive())["type"] == "http.disconnect"
        ended.append(True)

    async def run(port: int) -> None:
        own = server(app, port)
        await own.follow({"ours": "/"})
        assert await ask(port, "/") == [(200, "whole")]
        await until(lambda: ended)
        await close(own)

    scenario(run)


def test_gateways_of_a_node_share_the_port():
    async def run(port: int) -> None:
        apps = [App("a"), App("b")]
        servers = [server(app, port) for app in apps]
        for own in servers:
            await own.follow({"ours": "/"})
        while not all(app.asked for app in apps):
            await ask(port, "/")
        await close(servers[0])
        before = apps[0].asked
        for _ in range(9):
            assert await ask(port, "/") == [(200, "b / below ")]
        assert apps[0].asked == before
        await close(servers[1])

    scenario(run)


def test_closing_ends_what_has_begun_and_takes_no_more():
    async def run(port: int) -> None:
        app = App()
        own = server(app, port)
        await own.follow({"ours": "/"})
        own.check()
        app.gate.clear()
        asking = asyncio.ensure_future(ask(port, "/slow"))
        await until(lambda: app.asked)
        idle, _ = await asyncio.open_connection(HOST, port)
        closing = asyncio.ensure_future(close(own))
        assert await idle.read() == b""  # a connection that waits for a request is closed
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
        assert not closing.done()
        app.gate.set()
        assert await asking == [(200, "app /slow below ")]
        await closing
        assert app.left == 0

    scenario(run)


def test_what_takes_longer_than_it_may_is_given_up_and_still_answered():
    async def run(port: int) -> None:
        app, told = App(), []

        def give_up() -> None:
            told.append(app.asked)
            app.gate.set()

        own = server(app, port)
        await own.follow({"ours": "/"})
        app.gate.clear()
        asking = asyncio.ensure_future(ask(port, "/slow"))
        await until(lambda: app.asked)
        await own.close(0.01, give_up)
        assert told == [1]
        assert await asking == [(200, "app /slow below ")]

    scenario(run)


PIECE = b"x" * (1 << 20)  # more than sockets buffer: after a few nobody reads them


class Writing(App):
    """Read the request and write more than the client reads; end half-written when `ended` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(99):
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})

        tasks = asyncio.create_task(write()), asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            for task in tasks:
                task.cancel()


async def unread(port: int) -> asyncio.StreamWriter:
    """Ask, and never read the answer."""
    _, writer = await asyncio.open_connection(HOST, port, limit=1)
    writer.write(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
    return writer


def test_a_connection_whose_client_does_not_read_is_cut_when_its_answer_ends_half_written():
    async def run(port: int) -> None:
        app = Writing()
        own = server(app, port)
        await own.follow({"ours": "/"})
        writer = await unread(port)
        (connection,) = await connections(own)
        await until(lambda: connection.flow.write_paused)
        app.ended.set()
        await until(lambda: not own._server.server_state.connections)
        assert app.left == 0
        writer.close()
        await close(own)

    scenario(run)


def test_closing_disconnects_clients_that_do_not_read(monkeypatch):
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 0.01)

    async def run(port: int) -> None:
        app, told = Writing(), []
        own = server(app, port)
        await own.follow({"ours": "/"})
        writer = await unread(port)
        (connection,) = await connections(own)
        await until(lambda: connection.flow.write_paused)
        await asyncio.wait_for(own.close(0.01, lambda: told.append(app.left)), PATIENCE)
        assert (told, app.left) == ([0], 1)
        writer.close()

    scenario(run)


async def connections(own: HttpServer) -> list[Any]:
    """Return the connections of a server, when there is one."""
    await until(lambda: own._server.server_state.connections)
    return list(own._server.server_state.connections)


def test_an_answer_ends_a_connection_that_is_old():
    """Move clients that never pause to another pod all the same, also where answers are longer than connections."""

    async def run(port: int) -> None:
        now = [0.0]
        ages = ConnectionAges(App(), lambda: now[0])
        own = server(ages, port)
        await own.follow({"ours": "/"})
        reader, writer = await asyncio.open_connection(HOST, port)

        async def closes(path: str = "/") -> bool:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            return b"connection: close" in head

        assert not await closes()
        now[0] = CONNECTION_SECONDS - 1
        assert not await closes()
        now[0] = CONNECTION_SECONDS + IDLE_SECONDS - 2  # an answer later, or a pause
        assert not await closes("/missing")  # a refusal may come before the body has been read
        assert await closes()
        assert await reader.read() == b""
        assert len(ages) == 0
        await ask(port, "/", "/")
        await ask(port, "/")
        assert len(ages) == 2
        now[0] += IDLE_SECONDS + 1
        await ask(port, "/")
        assert len(ages) == 1  # those that are closed by now are forgotten
        await close(own)

    scenario(run)


def test_connections_that_are_idle_are_closed_before_they_are_forgotten():
    assert HTTPOptions().keep_alive_timeout_s < IDLE_SECONDS


def test_beside_a_proxy_it_listens_while_no_other_application_is_there():
    async def run(port: int) -> None:
        own = server(App(), port, shared=True)
        others = {"ours": "/", "theirs": "/theirs"}
        for routes, listens in (({"ours": "/"}, True), (others, False), (others, False), ({"ours": "/"}, True)):
            await own.follow(routes)
            own.check()
            await until(lambda listens=listens: is_open(port) == listens)
        await close(own)
        assert not is_open(port)

    scenario(run)


def is_open(port: int) -> bool:
    """Whether anybody listens: the kernel answers, before anybody accepts."""
    try:
        socket.create_connection((HOST, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_an_address_that_is_taken_is_the_proxys_or_an_error():
    async def run(port: int) -> None:
        with socket.create_server((HOST, port)):
            with pytest.raises(OSError, match=rf"{port} \(gateway.host, gateway.port\): .*in use"):
                await server(App(), port).follow({"ours": "/"})
            shared = server(App(), port, shared=True)
            await shared.follow({"ours": "/"})
            shared.check()
            await close(shared)

    scenario(run)


def test_a_server_that_ended_by_itself_is_found():
    async def run(port: int) -> None:
        own = server(App(), port)
        await own.follow({"ours": "/"})
        assert own._serving is not None
        own._serving.cancel()
        await asyncio.wait([own._serving])
        with pytest.raises(RuntimeError, match="has ended"):
            own.check()

    scenario(run)


@pytest.mark.parametrize(
    ("host", "shared", "address"),
    [
        ("0.0.0.0", True, "10.0.0.7"),
        ("::", True, "10.0.0.7"),
        ("0.0.0.0", False, "0.0.0.0"),
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "localhost"),
        ("10.0.0.8", False, "10.0.0.8"),
    ],
)
def test_beside_a_proxy_at_all_addresses_it_takes_the_nodes_own(host, shared, address):
    assert own_address(host, "10.0.0.7", shared=shared) == address


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs SO_REUSEPORT")
def test_the_kernel_prefers_the_exact_address():
    """What the module counts on: of two listeners, that at the address itself gets all connections to it."""

    def listening(host: str, port: int) -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
        made.listen(64)
        made.settimeout(0)
        return made

    port = free_port(HOST)
    with listening("0.0.0.0", port) as everywhere, listening(HOST, port) as exact:
        for _ in range(20):
            with socket.create_connection((HOST, port)):
                exact.accept()[0].close()
        with socket.create_connection(("127.0.0.2", port)):
            everywhere.accept()[0].close()
        with pytest.raises(BlockingIOError):
            everywhere.accept()

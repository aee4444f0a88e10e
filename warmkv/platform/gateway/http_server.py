"""The gateway's own HTTP server, at the address of Serve's proxy: answers pass one process less.

Serve's proxies stay where a cluster has them, and both answer alike. A gateway listens at the address of its node, the
proxy at all addresses (`gateway.host: 0.0.0.0`), and the kernel prefers the exact one. So what comes to a node with a
gateway goes there at once; the proxy has all else: nodes without a gateway, and the time in which one is replaced. An
address that both must share gives each a part of the connections. Without proxies (`warmkv serve`) it listens alone.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ray.serve._private.http_util import configure_http_middlewares, configure_http_options_with_defaults
from ray.serve._private.http_util import start_asgi_http_server as start_uvicorn
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmkv.config import Config
from warmkv.platform.drain import CONNECTION_SECONDS, IDLE_SECONDS
from warmkv.platform.gateway.connections import BoundedConnection

log = logging.getLogger(__name__)

UNREAD_SECONDS = 2.0  # for clients to read how answers that were given up end; who does not is disconnected


class ConnectionAges:
    """End a client's connection with its answer once it is older than `CONNECTION_SECONDS` (ASGI middleware).

    A Service that leads to other pods moves no connection that is there, and a busy client never gives its own up.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._opened: dict[tuple[str, int], float] = {}  # by the client's address
        self._idle: dict[tuple[str, int], float] = {}  # since when, the longest first

    def __len__(self) -> int:
        return len(self._opened)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope.get("client"):
            await self._app(scope, receive, send)
            return
        client, ends = tuple(scope["client"]), False
        opened = self._opened.setdefault(client, self._clock())
        self._idle.pop(client, None)

        async def sent(message: Message) -> None:
            nonlocal ends
            # A refusal may come before the body has been read: who still sends that would lose it with the connection.
            answers = message["type"] == "http.response.start" and message["status"] < 400
            if answers and (ends := self._clock() - opened >= CONNECTION_SECONDS):
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            if ends:  # the next one from this address is new
                self._opened.pop(client, None)
            else:
                self._idle[client] = self._clock()
            self._forget()

    def _forget(self) -> None:
        """Forget connections that are closed by now."""
        until = self._clock() - IDLE_SECONDS
        while self._idle and self._idle[client := next(iter(self._idle))] < until:
            del self._idle[client]
            self._opened.pop(client, None)


class Paths:
    """ASGI application: another one below its prefix, and beside it what Serve's proxy answers: health and routes."""

    def __init__(self, app: ASGIApp, application: str) -> None:
        self._app, self._application = app, application
        self.prefix = "/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root, prefix = scope.get("root_path", ""), self.prefix.rstrip("/")
        path = scope["path"].removeprefix(root)
        response: Response
        if path == "/-/healthz":
            response = PlainTextResponse("success")
        elif path == "/-/routes":
            response = JSONResponse({self.prefix: self._application})
        elif path == prefix or path.startswith(f"{prefix}/"):
            await call_until_disconnect(self._app, {**scope, "root_path": root + prefix}, receive, send)
            return
        else:
            response = PlainTextResponse(f"Path '{path}' not found. See /-/routes.", 404)
        await response(scope, receive, send)


async def call_until_disconnect(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Call an application, and cancel it where the client leaves before the end of its answer, as Serve's proxy does.

    The connection is listened to when the body has been read: until then, what reads it hears of that. Where an answer
    ends half-written and its client does not read, the connection is aborted: uvicorn would wait for it to be read.
    """
    left, whole = asyncio.Event(), False
    listening: asyncio.Task[None] | None = None
    calling = asyncio.current_task()
    assert calling is not None

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        if not whole:
            calling.cancel()

    async def received() -> Message:
        nonlocal listening
        if listening is not None:
            await left.wait()
            return {"type": "http.disconnect"}
        message = await receive()
        if not message.get("more_body"):
            listening = asyncio.create_task(listen())
        return message

    async def sent(message: Message) -> None:
        nonlocal whole
        whole = message["type"] == "http.response.body" and not message.get("more_body")
        await send(message)

    try:
        await app(scope, received, sent)
    except asyncio.CancelledError:
        if not left.is_set() or whole:
            raise
        calling.uncancel()
    finally:
        if listening is not None:
            listening.cancel()
        transport = getattr(getattr(receive, "__self__", None), "transport", None)  # if it is uvicorn's own
        if transport is not None and not whole and transport.get_write_buffer_size():
            transport.abort()


class HttpServer:
    """Serves an application at an address while it has that to itself, or shares it with Serve's proxy only.

    `shared` says that proxies listen at the port. Then other applications may have paths there that a proxy alone can
    tell apart: while there are any, this server is closed.
    """

    def __init__(self, paths: Paths, application: str, options: HTTPOptions, *, shared: bool) -> None:
        self._paths, self._application, self._shared = paths, application, shared
        self._options = configure_http_middlewares(configure_http_options_with_defaults(options))
        self._server: Any = None  # uvicorn's
        self._serving: asyncio.Task[None] | None = None
        self._ending: dict[asyncio.Task[None], Any] = {}  # servers that accept no more, and have answers that go on

    async def follow(self, routes: Mapping[str, str]) -> None:
        """Take the prefixes of all applications of the cluster by name, and open or close by them.

        Raises OSError where the address is taken, or is none of this node's, and no proxy listens.
        """
        self._paths.prefix = routes.get(self._application, self._paths.prefix)
        alone = routes.keys() <= {self._application}
        if self._serving is None and (alone or not self._shared):
            await self._open()
        elif self._shared and not alone:
            self._stop()

    async def close(self, seconds: float, give_up: Callable[[], None]) -> None:
        """Accept no more connections, close those that are idle, and wait for the answers that have begun.

        Those that go on after `seconds` are ended by `give_up`: Serve would cut them off in the middle. Clients that do
        not read how they end are disconnected.
        """
        self._stop()
        if not self._ending:
            return
        _, late = await asyncio.wait(self._ending, timeout=seconds)
        if late:
            give_up()
            _, late = await asyncio.wait(late, timeout=UNREAD_SECONDS)
        if late:
            for connection in [one for task in late for one in self._ending[task].server_state.connections]:
                connection.transport.abort()
            await asyncio.wait(late)

    def check(self) -> None:
        """Raise RuntimeError where it should serve and does not."""
        if (serving := self._serving) is not None and serving.done():
            raise RuntimeError("the HTTP server has ended") from (None if serving.cancelled() else serving.exception())

    def _stop(self) -> None:
        if self._serving is not None:
            self._ending[self._serving] = self._server
            self._serving.add_done_callback(self._ending.pop)
            self._serving, self._server.should_exit = None, True

    async def _open(self) -> None:
        options, loop = self._options, asyncio.get_running_loop()
        try:
            self._serving, self._server = await start_uvicorn(
                self._paths, options, event_loop=loop, enable_so_reuseport=True
            )
        except RuntimeError as error:
            why = f"{options.host}:{options.port} (gateway.host, gateway.port): {error.__cause__ or error}"
            if not self._shared:
                raise OSError(why) from None
            log.info("Serve's proxy alone listens for this gateway: %s", why)
            return
        self._server.config.http = BoundedConnection  # which it loads in its first turn
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        log.info("listening at %s:%d", options.host, options.port)


def own_address(host: str, node: str, *, shared: bool) -> str:
    """Return the address of a gateway: the most exact one that is reached under `host`."""
    try:
        is_any = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:  # a name
        is_any = False
    return node if is_any and shared else host


@asynccontextmanager
async def serving(
    app: ASGIApp, application: str, config: Config, node: str, give_up: Callable[[], None]
) -> AsyncIterator[HttpServer | None]:
    """Serve an application of the Serve that this process belongs to; `node` is the address of this node.

    At the end answers have `cluster.drain_seconds`; then `give_up` ends them.

    Yields None where Serve's proxies were given another port than `gateway.port`: then they alone are asked.
    """
    client, gateway = _get_global_client(), config.gateway
    assert client is not None
    controller = client._controller
    options: HTTPOptions = await controller.get_http_config.remote()
    shared = await controller.get_proxy_location.remote() != ProxyLocation.Disabled
    if shared and options.port != gateway.port:
        yield None
        return
    own = {"host": own_address(gateway.host, node, shared=shared), "port": gateway.port}
    server = HttpServer(Paths(app, application), application, options.model_copy(update=own), shared=shared)
    tables: asyncio.Queue[Any] = asyncio.Queue()
    polling = LongPollClient(
        controller, {LongPollNamespace.ROUTE_TABLE: tables.put_nowait}, asyncio.get_running_loop(), f"gateway at {node}"
    )

    async def take() -> None:
        table = await tables.get()
        await server.follow({endpoint.app_name: known.route for endpoint, known in table.items()})

    async def follow() -> None:
        while True:
            await take()

    await take()
    following = asyncio.create_task(follow())
    try:
        yield server
    finally:
        polling.stop()
        following.cancel()
        await server.close(config.cluster.drain_seconds, give_up)

"""A replica's connections to gateways: one each, over which the events of all its requests go back."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, cast

import orjson

from warmkv.replicas.frames import encode
from warmkv.replicas.protocol import Event, ReplyTo

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
MOST_UNREAD = 1 << 26  # bytes that wait for a gateway; one that reads none of so many has hung


class Link(asyncio.Protocol):
    """The stream to one gateway. What is sent in one turn of the event loop is one message."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self._closed = closed
        self._pending: list[tuple[int, Event]] = []
        self._listeners: set[Callable[[Exception], None]] = set()
        self._transport: asyncio.Transport | None = None
        self.messages = 0  # so far

    def begin(self, key: str) -> None:
        """Say who connects. Raises ConnectionError where the connection is lost already."""
        if self._transport is None:
            raise ConnectionError("the gateway closed the connection")
        self._transport.write(orjson.dumps({"key": key}, option=orjson.OPT_APPEND_NEWLINE))

    def send(self, stream: int, event: Event) -> None:
        """Send an event, with all others of this turn of the loop. It is dropped where the gateway is gone."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append((stream, event))

    @contextmanager
    def heard(self, lost: Callable[[Exception], None]) -> Iterator[None]:
        """Call `lost` if the connection is lost meanwhile, or is already."""
        if self._transport is None:
            lost(ConnectionError("the connection to the gateway is lost"))
        self._listeners.add(lost)
        try:
            yield
        finally:
            self._listeners.discard(lost)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed()
        for lost in tuple(self._listeners):
            lost(ConnectionError(f"the connection to the gateway is lost: {exc or 'it was closed'}"))

    def _flush(self) -> None:
        events, self._pending = self._pending, []
        if self._transport is None:
            return
        self._transport.write(encode(events))
        self.messages += 1
        if self._transport.get_write_buffer_size() > MOST_UNREAD:
            log.error("a gateway has not read %d bytes: its connection is closed", MOST_UNREAD)
            self._transport.abort()


class Links:
    """The links of one replica, opened at the first request of a gateway and kept. For one event loop."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._opening: dict[ReplyTo, asyncio.Task[Link]] = {}

    async def to(self, reply: ReplyTo) -> Link:
        """Return the link to a gateway. Raises OSError (or TimeoutError) where it cannot be reached."""
        gateway = ReplyTo(reply.host, reply.port, reply.key)
        opening = self._opening.get(gateway)
        if opening is None:
            opening = self._opening[gateway] = asyncio.create_task(self._open(gateway))
        return await asyncio.shield(opening)  # others wait for it, too

    async def _open(self, gateway: ReplyTo) -> Link:
        def forget() -> None:
            self._opening.pop(gateway, None)

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, link = await loop.create_connection(lambda: Link(forget), gateway.host, gateway.port, ssl=self._tls)
        except BaseException:
            forget()
            raise
        link.begin(gateway.key)
        return link

    async def close(self) -> None:
        """Close all links."""
        for opening in tuple(self._opening.values()):
            if opening.done():
                opening.result().close()
            opening.cancel()


def ray_tls(role: Literal["client", "server"]) -> ssl.SSLContext | None:
    """Return a context of the certificates that Ray itself is told to use (RAY_USE_TLS); None where it uses none."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == "server" else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # nodes have addresses; who holds a certificate of the cluster belongs to it
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    return context

"""A replica's connections to gateways: one each, over which requests come and the events of all of them go back."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import Literal, cast

import orjson

from warmkv.replicas.frames import Orders, encode
from warmkv.replicas.protocol import Event, GatewayAddress, GenerateRequest

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
MOST_UNREAD = 1 << 26  # bytes that wait for a gateway; one that reads none of so many has hung

PROBE_SECONDS, PROBES = 5, 4
"""An idle connection is probed so often; the other side is gone when so many in a row are not answered."""

Take = Callable[["Link", int, GenerateRequest | None], None]
"""Called with each order: a request under the number of its stream, or None, which cancels it. Does not raise."""


class Link(asyncio.Protocol):
    """The connection to one gateway. What is sent in one turn of the event loop is one message."""

    def __init__(self, take: Take, lost: Callable[[Link], None]) -> None:
        self._take, self._lost = take, lost
        self._orders = Orders()
        self._pending: list[tuple[int, Event]] = []
        self._transport: asyncio.Transport | None = None
        self.messages = 0  # so far

    def begin(self, key: str, name: str) -> None:
        """Say who connects. Raises ConnectionError where the connection is lost already."""
        if self._transport is None:
            raise ConnectionError("the gateway closed the connection")
        self._transport.write(orjson.dumps({"key": key, "replica": name}, option=orjson.OPT_APPEND_NEWLINE))

    def send(self, stream: int, event: Event) -> None:
        """Send an event, with all others of this turn of the loop. It is dropped where the gateway is gone."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append((stream, event))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        notice_when_gone(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            orders = self._orders.feed(data)
        except Exception as error:  # of unpickling: anything
            log.error("a gateway that cannot be understood is left: %s: %s", type(error).__name__, error)
            if self._transport is not None:
                self._transport.abort()
            return
        for stream, request in orders:
            self._take(self, stream, request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self)

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
    """The links of one replica, opened where a gateway asks for it and kept. For one event loop."""

    def __init__(self, name: str, take: Take, lost: Callable[[Link], None], tls: ssl.SSLContext | None = None) -> None:
        self._name, self._take, self._lost, self._tls = name, take, lost, tls
        self._opening: dict[GatewayAddress, asyncio.Task[Link]] = {}

    async def to(self, gateway: GatewayAddress) -> Link:
        """Return the link to a gateway. Raises OSError (or TimeoutError) where it cannot be reached."""
        opening = self._opening.get(gateway)
        if opening is None:
            opening = self._opening[gateway] = asyncio.create_task(self._open(gateway))
        return await asyncio.shield(opening)  # others wait for it, too

    async def _open(self, gateway: GatewayAddress) -> Link:
        def forget(link: Link | None = None) -> None:
            self._opening.pop(gateway, None)
            if link is not None:
                self._lost(link)

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, link = await loop.create_connection(
                    lambda: Link(self._take, forget), gateway.host, gateway.port, ssl=self._tls
                )
        except BaseException:
            forget()
            raise
        link.begin(gateway.key, self._name)
        return link

    async def close(self) -> None:
        """Close all links."""
        for opening in tuple(self._opening.values()):
            if opening.done():
                opening.result().close()
            opening.cancel()


def notice_when_gone(transport: asyncio.BaseTransport) -> None:
    """Have a connection probed while it is idle: a node that is gone says no more."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PROBE_SECONDS * (PROBES + 1))


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

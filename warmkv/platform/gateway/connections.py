"""Bounds of connections, before a key is asked for: uvicorn has none, and httptools keeps heads of any length."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 1 << 16  # of a head or of trailers, and of one read behind it
HEAD_SECONDS = 30.0  # until a head is whole, from the connection's start or the first byte behind an answer
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def most_connections() -> int:
    """Return half of the files that this process may have open: the rest is for logs and connections to replicas."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 % (1 << 32)  # without a limit it is negative


class BoundedConnection(HttpToolsProtocol):
    """Refuse a head that is too large (431); close a connection whose head does not come, or that is one too many."""

    _deadline: asyncio.TimerHandle | None = None
    _unread = 0  # bytes of which nothing but headers has been made
    _headers = 0  # bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_expecting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            self._refuse()
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._headers = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header or a trailer. Raises ValueError where they are too large, which ends the parsing."""
        self._headers += len(name) + len(value)
        if self._headers > HEAD_BYTES:
            raise ValueError("the head is too large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request."""
        self._unread = 0
        self._stop_expecting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._unread = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, or is not parsed any further."""
        if self._headers > HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        self.transport.write(TOO_LARGE)
        self.transport.close()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_expecting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

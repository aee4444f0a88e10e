"""A pass-through proxy for the APIs of OpenAI and Anthropic that writes an access log beside it.

Bytes pass as they come, in both directions and at the speed of the slower side; only hop-by-hop headers (RFC 9110,
7.6.1) and `Host` are the proxy's own. What is written down is a copy, which is read in the thread of the log.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from warmkv.platform.access_log import AccessLog
from warmkv.platform.recording.exchange import LONGEST_BODY, Analyst, Exchange, api_of

log = logging.getLogger(__name__)

HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
        "expect",  # which is met here: an upstream that sends no 100 would have both sides wait
    )
)
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
LONGEST_HEADER = 1 << 16
MOST_KEPT = 256 << 20  # bytes of exchanges that pass or wait to be written down, all together
MOST_WAITING = 5_000  # exchanges that wait to be written down
CONNECT_SECONDS = 30.0


class Recorder:
    """Counts exchanges and hands them to the log; those that do not fit into memory pass without being written."""

    def __init__(self, log: AccessLog, analyst: Analyst) -> None:
        self._log, self._analyst = log, analyst
        self.passed = self._handed = self._left_out = 0
        self._lost = self._written = 0  # of those handed over; by the log's thread
        self._lock, self._kept = threading.Lock(), 0  # bytes

    def keep(self, part: bytearray, data: bytes) -> bool:
        """Copy bytes that passed; False where there is no room, and the exchange is not to be written."""
        if len(part) + len(data) > LONGEST_BODY or self._kept + len(data) > MOST_KEPT:
            return False
        part += data
        with self._lock:
            self._kept += len(data)
        return True

    def ended(self, exchange: Exchange, *, whole: bool) -> None:
        """Have an exchange written, if all of it was kept."""
        if whole and self._handed - self._written < MOST_WAITING:
            self._handed += 1
            self._log.write(_Line(self, exchange))
        else:
            self._left_out += 1
            self._release(exchange)

    def lost(self, lines: int) -> None:
        """Count lines that the log could not write."""
        self._lost += lines

    def _release(self, exchange: Exchange) -> None:
        with self._lock:
            self._kept -= len(exchange.request) + len(exchange.answer)

    def line(self, exchange: Exchange) -> str:
        """Return the line of an exchange. Raises what the analysis raises; nothing of the exchange is in it."""
        try:
            return self._analyst.record(exchange).to_json()
        except Exception as error:
            raise ValueError(f"a request is not written: {type(error).__name__}") from None
        finally:
            self._written += 1
            self._release(exchange)

    @property
    def figures(self) -> dict[str, int]:
        """Return how many requests passed, how many of those that generate were written, and how many were not."""
        left_out = self._left_out + self._lost
        return {"passed": self.passed, "recorded": self._handed - self._lost, "left_out": left_out}


class _Line:
    """A line of the log that is made when it is written, by the log's thread."""

    def __init__(self, recorder: Recorder, exchange: Exchange) -> None:
        self._recorder, self._exchange = recorder, exchange

    def to_json(self) -> str:
        return self._recorder.line(self._exchange)


class Proxy:
    """Forwards all requests to an upstream; without a recorder nothing is kept of them.

    `clock` is monotonic, `wall_clock` Unix time, both in seconds.
    """

    def __init__(
        self,
        upstream: str,
        recorder: Recorder | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._address, self._recorder = upstream.rstrip("/"), recorder
        self._clock, self._wall_clock = clock, wall_clock
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def running(self, host: str, port: int) -> AsyncIterator[int]:
        """Listen while the context is entered; yield the port. Raises OSError where the address cannot be had."""
        limits: dict[str, Any] = {"max_line_size": LONGEST_HEADER, "max_field_size": LONGEST_HEADER}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            **limits,
        )
        server = web.Server(self._forward, handler_cancellation=True, auto_decompress=False, access_log=None, **limits)
        runner = web.ServerRunner(server, shutdown_timeout=5.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()
            await self._session.close()

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        begun, exchange, whole, recorder = self._clock(), None, True, self._recorder
        if recorder is not None:
            recorder.passed += 1
        if recorder is not None and api_of(request.method, request.path):
            headers = {name.lower(): value for name, value in request.headers.items()}
            exchange = Exchange(request.path, self._wall_clock(), headers)

        def copied(part: bytearray, data: bytes) -> None:
            nonlocal whole
            whole = whole and exchange is not None and recorder is not None and recorder.keep(part, data)

        async def body() -> AsyncIterator[bytes]:
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # no answer has begun: aiohttp may still refuse the request
            async for data in request.content.iter_any():
                if exchange is not None:
                    copied(exchange.request, data)
                yield data

        try:
            return await self._answered(request, body(), exchange, begun, copied)
        except asyncio.CancelledError:
            if exchange is not None:
                exchange.outcome = "cancelled"
            raise
        except _ClientLeftError:
            if exchange is not None:
                exchange.outcome = "cancelled"
            raise asyncio.CancelledError from None
        finally:
            if exchange is not None and recorder is not None:
                exchange.last = self._clock() - begun
                recorder.ended(exchange, whole=whole)

    async def _answered(
        self,
        request: web.BaseRequest,
        body: AsyncIterator[bytes],
        exchange: Exchange | None,
        begun: float,
        copied: Callable[[bytearray, bytes], None],
    ) -> web.StreamResponse:
        answer: web.StreamResponse | None = None
        try:
            async with self._upstream(request, body, exchange) as upstream:
                if exchange is not None:
                    exchange.code = upstream.status
                    exchange.answer_headers = {name.lower(): value for name, value in upstream.headers.items()}
                answer = _Answer(upstream)
                await _told(answer.prepare(request))
                async for data in upstream.content.iter_any():
                    if exchange is not None:
                        exchange.first = exchange.first or self._clock() - begun
                        copied(exchange.answer, data)
                    await _told(answer.write(data))
                await _told(answer.write_eof())
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if exchange is not None:
                exchange.outcome = "error"
            if answer is not None and answer.prepared:  # what the client has is cut off where upstream cut it off
                if request.transport is not None:
                    request.transport.abort()
                return answer
            if exchange is not None:
                exchange.code = 502
            log.warning("upstream cannot be reached: %s", error)
            message = f"upstream cannot be reached: {error}"
            return web.json_response({"type": "error", "error": {"type": "api_error", "message": message}}, status=502)

    @asynccontextmanager
    async def _upstream(
        self, request: web.BaseRequest, body: AsyncIterator[bytes], exchange: Exchange | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request on; yield the answer as it begins. Raises ClientError, TimeoutError or OSError."""
        async with await self._sent(self._address, request, body if request.body_exists else None) as answer:
            yield answer

    async def _sent(
        self, address: str, request: web.BaseRequest, body: Any, own: Mapping[str, str] = NO_HEADERS
    ) -> aiohttp.ClientResponse:
        """Send a request on, with headers of our own in place of the client's."""
        assert self._session is not None
        headers = _end_to_end(_decoded(request.raw_headers))
        headers.update(own)
        if isinstance(body, bytes) and "Content-Length" in headers:
            headers["Content-Length"] = str(len(body))
        return await self._session.request(
            request.method,
            URL(address + request.raw_path, encoded=True),
            headers=headers,
            data=body,
            allow_redirects=False,
        )


class _ClientLeftError(Exception):
    """A client that left before the end of its answer."""


async def _told(writing: Any) -> None:
    """Wait until the client takes bytes. Raises _ClientLeftError."""
    try:
        await writing
    except (ConnectionError, aiohttp.ClientError) as error:
        raise _ClientLeftError from error


class _Answer(web.StreamResponse):
    """An answer with the upstream's status and headers, and none that it does not have."""

    def __init__(self, upstream: aiohttp.ClientResponse) -> None:
        super().__init__(status=upstream.status, reason=upstream.reason)
        self._given = _end_to_end(_decoded(upstream.raw_headers))

    async def _prepare_headers(self) -> None:
        self._headers = CIMultiDict(self._given)
        await super()._prepare_headers()
        own = {name.lower() for name in self._given} | {"transfer-encoding", "connection"}
        for name in [name for name in self._headers if name.lower() not in own]:
            del self._headers[name]


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """Decode headers so that aiohttp, which encodes them as UTF-8, sends the same bytes wherever they are UTF-8."""
    return ((_text(name), _text(value)) for name, value in headers)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _end_to_end(headers: Iterable[tuple[str, str]]) -> CIMultiDict[str]:
    """Return headers without those of a hop: those of the protocol, those that `Connection` names, and `Host`."""
    found: CIMultiDict[str] = CIMultiDict(headers)
    named = {name.strip().lower() for value in found.getall("Connection", ()) for name in value.split(",")}
    for name in {name for name in found if name.lower() in HOP_BY_HOP | named | {"host"}}:
        found.popall(name)
    return found

"""Server-sent events as a response: written as they come, with pings while there are none."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

MESSAGES_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
PING_SECONDS = 5.0  # silence of a stream after which it sends a ping
LATE_SECONDS = 5.0  # after its deadline, in which a stream may still write the error that it ends with
OPENAI_PING = b": ping\n\n"  # a comment


class Source(Protocol):
    """Feed a stream until it is closed; fail at the `deadline`, a time of the loop."""

    @property
    def deadline(self) -> float: ...
    async def aclose(self) -> None: ...


class EventWriter:
    """Writes to a client, by ASGI's `send`, from any callback of the event loop: no task is woken for a piece.

    Where `send` would wait, because the client reads too slowly, a task waits in its place, and `is_behind` until then.
    `lost` gets what `send` raised. After `silence` seconds without an event, `ping` is sent. `held` are the last
    events, which are written with the end of the stream.
    """

    def __init__(self, send: Send, ping: bytes, silence: float) -> None:
        self._send, self._ping, self._silence = send, ping, silence
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Task[None] | None = None
        self.held = b""
        self.lost: asyncio.Future[Exception] = self._loop.create_future()
        self._spoke = self._loop.time()
        self._timer = self._loop.call_at(self._spoke + silence, self._fill_silence)

    @property
    def is_behind(self) -> bool:
        """Return True while the client must read, or has gone: then nothing may be written without `send`."""
        return self._waiting is not None or self.lost.done()

    def write(self, event: bytes) -> None:
        """Write an event now."""
        self._spoke = self._loop.time()
        sending = self._send({"type": "http.response.body", "body": event, "more_body": True}).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        except Exception as error:
            self.lost.set_result(error)
        else:
            self._waiting = self._loop.create_task(self._finish(sending, waits_for))

    def hold(self, event: bytes) -> None:
        """Keep an event for the end of the stream; only others that are held may follow."""
        self.held += event

    async def send(self, event: bytes) -> None:
        """Write an event when the client has read enough. Never returns if it has gone."""
        await self.drain()
        self.write(event)

    async def drain(self) -> None:
        """Wait until the client has read enough. Never returns if it has gone."""
        while self._waiting is not None:
            await self._waiting
        if self.lost.done():
            await asyncio.Event().wait()

    def close(self) -> None:
        """Write no more."""
        self._timer.cancel()
        if self._waiting is not None:
            self._waiting.cancel()

    async def _finish(self, sending: Generator[Any, Any, Any], waits_for: Any) -> None:
        try:
            await _rest(sending, waits_for)
        except Exception as error:
            self.lost.set_result(error)
        finally:
            self._waiting = None

    def _fill_silence(self) -> None:
        now = self._loop.time()
        if now >= self._spoke + self._silence:
            self._spoke = now
            if not self.is_behind:
                self.write(self._ping)
        self._timer = self._loop.call_at(self._spoke + self._silence, self._fill_silence)


@types.coroutine
def _rest(begun: Generator[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, None]:
    """Await an awaitable that was begun already, and that waits for this."""
    yield waits_for
    yield from begun


class EventStream(Response):
    """A stream of events: `write` has them written, until it returns or the client leaves. Closes `source` then.

    One whose client reads so slowly that it has not ended by the deadline of its source is given up half-written.
    """

    def __init__(
        self,
        write: Callable[[EventWriter], Awaitable[None]],
        source: Source,
        ping: bytes,
        silence: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._write, self._source, self._ping, self._silence = write, source, ping, silence
        self.status_code, self.media_type, self.background = 200, "text/event-stream", None
        self.init_headers({"cache-control": "no-cache", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream. Raises ClientDisconnect where `send` says that the client has left."""
        try:
            async with asyncio.timeout_at(self._source.deadline + LATE_SECONDS) as limit:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if (last := await self._written(receive, send)) is not None:
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        except OSError:  # a TimeoutError is one, too
            if not limit.expired():
                raise ClientDisconnect from None
        finally:
            await self._source.aclose()

    async def _written(self, receive: Receive, send: Send) -> bytes | None:
        """Return what is left to write with the end, None if the client has left. Raises what `send` raises."""
        out = EventWriter(send, self._ping, self._silence)

        async def written() -> None:
            await self._write(out)
            await out.drain()

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        writing, leaving = asyncio.ensure_future(written()), asyncio.ensure_future(left())
        try:
            await asyncio.wait((writing, leaving, out.lost), return_when=asyncio.FIRST_COMPLETED)
            if out.lost.done():
                raise out.lost.result()
            if not writing.done():
                return None
            writing.result()
            return out.held
        finally:
            out.close()
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

"""Server-sent events as a response: pings while nothing is to say, and an end that frees what the stream holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MESSAGES_PING = 'event: ping\ndata: {"type": "ping"}\n\n'
PING_SECONDS = 5.0  # silence of a stream after which it sends a ping
OPENAI_PING = ": ping\n\n"  # a comment


class Closable(Protocol):
    async def aclose(self) -> None: ...


class EventStream(StreamingResponse):
    """A stream of events that sends `ping` after `silence` seconds without one.

    Closes the events and then their source at its end, even if the client leaves before the first event is asked for.
    """

    def __init__(self, events: AsyncGenerator[str], source: Closable, ping: str, silence: float) -> None:
        self._events, self._source, self._ping, self._silence = events, source, ping, silence
        self._spoke = 0.0  # time of the loop
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                await self._source.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send every event as it comes, and pings between. Raises what `send` raises where the client has left."""
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._spoke = loop.time()
        try:
            async with asyncio.TaskGroup() as group:
                pings = group.create_task(self._send_pings(send))
                async for event in self._events:
                    self._spoke = loop.time()
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                pings.cancel()
        except ExceptionGroup as failed:  # the client has left: Starlette expects it plain
            raise failed.exceptions[0] from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Send) -> None:
        ping = {"type": "http.response.body", "body": self._ping.encode(), "more_body": True}
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._spoke + self._silence - loop.time())
            if loop.time() >= self._spoke + self._silence:
                self._spoke = loop.time()
                await send(ping)

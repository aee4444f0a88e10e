"""Server-sent events as a response: pings while nothing is to say, and an end that frees what the stream holds."""

from __future__ import annotations

import asyncio
import contextlib
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
        self._source, self._chunks = source, pinged(events, ping, silence)
        super().__init__(self._chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._chunks.aclose()
            finally:
                await self._source.aclose()


async def pinged(events: AsyncGenerator[str], ping: str, silence: float) -> AsyncGenerator[str]:
    """Yield the events, and `ping` whenever `silence` seconds have passed since the last chunk."""
    waiting: asyncio.Task[str | None] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(_next(events))
            while not (await asyncio.wait((waiting,), timeout=silence))[0]:
                yield ping
            chunk, waiting = waiting.result(), None
            if chunk is None:
                return
            yield chunk
    finally:
        if waiting is not None:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        await events.aclose()


async def _next(events: AsyncGenerator[str]) -> str | None:
    return await anext(events, None)

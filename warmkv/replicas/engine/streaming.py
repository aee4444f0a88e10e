"""From the engine's thread to an asynchronous stream of text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.scheduler import EngineEvent
from warmkv.replicas.engine.text import Detokenizer
from warmkv.replicas.protocol import Admitted, Alive, Delta, Event, Failed, Finished, GenerateRequest, Started

CONTEXT_TOKENS = 4  # of the prompt, for decoding what follows it


async def stream(
    engine: Engine, request: GenerateRequest, decode: Callable[[Sequence[int]], str], beat_seconds: float
) -> AsyncGenerator[Event]:
    """Submit a request and yield Admitted, Started, text as it comes, then Finished (or Failed).

    After `beat_seconds` with nothing to say it yields Alive, if the engine's thread has turned meanwhile.
    Raises EngineError where the request cannot be taken. Closing the stream cancels the request.
    """
    loop = asyncio.get_running_loop()
    beat, turns = loop.time() + beat_seconds, engine.turns
    events: asyncio.Queue[EngineEvent] = asyncio.Queue()
    engine.submit(request, lambda event: _put(loop, events, event))
    detokenizer = Detokenizer(decode, request.sampling.stop, request.token_ids[-CONTEXT_TOKENS:])
    drawn = 0
    tokens: list[int] = []
    end: Finished | Failed | None = None
    try:
        yield Admitted()
        while end is None:
            batch: list[EngineEvent] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat):
                    batch.append(await events.get())
            while not events.empty():  # tokens that came in the meantime travel together
                batch.append(events.get_nowait())
            text = ""
            for event in batch:
                if isinstance(event, int):
                    drawn += 1
                    tokens.append(event)
                    text += detokenizer.push(event)
                    if detokenizer.stopped_by is not None:
                        break
                elif isinstance(event, Started):
                    yield event
                else:
                    end = event
            if isinstance(end, Finished) and detokenizer.stopped_by is None:
                text += detokenizer.finish()
                drawn = end.output_tokens
            silent = loop.time() >= beat
            if text:
                yield Delta(text, drawn, tuple(tokens))
                tokens.clear()
            elif silent and (batch or engine.turns > turns):
                yield Alive()
            if text or silent:
                beat, turns = loop.time() + beat_seconds, engine.turns
            if detokenizer.stopped_by is not None:  # the engine may still be drawing: `finally` stops it
                yield Finished("stop", drawn, detokenizer.stopped_by)
                return
        yield end
    finally:
        if end is None:
            engine.cancel(request.id)


def _put(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[EngineEvent], event: EngineEvent) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)

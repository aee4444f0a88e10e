"""The events of an engine's answer as an asynchronous generator: what a replica does, without a gateway's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

from tokenizers import Tokenizer

from warmkv.config import Config
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.protocol import Event, Failed, Finished, GenerateRequest

BEAT = Config().gateway.beat_seconds

_processors: dict[Engine, tuple[asyncio.AbstractEventLoop, OutputProcessor]] = {}
_compilers: dict[Engine, Compiler] = {}


async def stream(
    engine: Engine, request: GenerateRequest, tokenizer: Tokenizer, beat: float = BEAT
) -> AsyncGenerator[Event]:
    """Submit a request and yield its events. Raises EngineError. Closing the generator cancels the request."""
    loop = asyncio.get_running_loop()
    if engine not in _processors or _processors[engine][0] is not loop:
        _processors[engine] = loop, OutputProcessor(engine, tokenizer, beat)
    processor = _processors[engine][1]
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    matcher = None
    if (constraint := request.sampling.constraint) is not None:
        if engine not in _compilers:
            source = SimpleNamespace(backend_tokenizer=tokenizer)
            _compilers[engine] = Compiler(source, engine.model.vocabulary, engine.model.eos_ids)
        matcher = _compilers[engine].matcher(constraint)
    output = processor.submit(request, events.put_nowait, matcher=matcher)
    output.ended.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
            if isinstance(event, Finished | Failed):
                return
        await output.ended
    finally:
        processor.cancel(output)

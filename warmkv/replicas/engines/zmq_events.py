"""vLLM's KV events as they come over ZMQ: numbered batches, and those of its replay buffer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from warmkv.replicas.engines.event_stream import Batch

REPLAY_SECONDS = 5.0  # within which missing batches come, or are taken for lost


async def batches(socket: Any) -> AsyncIterator[Batch]:
    """Yield batches of a connected SUB socket; messages of other kinds are left out."""
    while True:
        message = await socket.recv_multipart()
        if len(message) == 3:  # topic, number, events
            yield int.from_bytes(message[1], "big"), message[2]


async def replayed(context: Any, endpoint: str, first: int) -> Sequence[Batch]:
    """Return the batches from a number on that vLLM still has; what came in time where it does not answer."""
    import zmq

    found: list[Batch] = []
    with context.socket(zmq.DEALER) as socket:  # one question, many answers
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLAY_SECONDS):
                while True:
                    *_, number, payload = await socket.recv_multipart()
                    if (at := int.from_bytes(number, "big", signed=True)) < 0:
                        break
                    found.append((at, payload))
    return found

"""A vLLM server as far as its KV events go: it publishes what it is told to over ZMQ, and answers replays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgpack
import zmq
import zmq.asyncio

SIZE = 4


class Publisher:
    """Publish numbered batches from 0 on; the last `buffer` of them can be had again."""

    def __init__(self, sockets: tuple[zmq.asyncio.Socket, zmq.asyncio.Socket], clock: float, buffer: int) -> None:
        self._events, self._replays = sockets
        self._clock, self._buffer = clock, buffer
        self.sent: list[tuple[int, bytes]] = []

    async def subscribed(self) -> None:
        """Wait until somebody follows: what is published before reaches nobody."""
        assert await self._events.recv() == b"\x01"

    async def send(self, *events: dict[str, object], lost: bool = False) -> None:
        number, payload = len(self.sent), msgpack.packb([self._clock + len(self.sent), list(events), 0])
        self.sent.append((number, payload))
        if not lost:
            await self._events.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def answer_replays(self) -> None:
        while True:
            client, empty, first = await self._replays.recv_multipart()
            for number, payload in self.sent[max(0, len(self.sent) - self._buffer) :]:
                if number >= int.from_bytes(first, "big"):
                    await self._replays.send_multipart([client, empty, b"kv", number.to_bytes(8, "big"), payload])
            await self._replays.send_multipart([client, empty, b"", (-1).to_bytes(8, "big", signed=True), b""])


@contextlib.asynccontextmanager
async def publishing(ports: list[int], clock: float = 0.0, buffer: int = 100) -> AsyncIterator[Publisher]:
    """Run a publisher at two ports, which are appended where none are given yet."""
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as events, context.socket(zmq.ROUTER) as replays:
        for at, socket in enumerate((events, replays)):
            socket.setsockopt(zmq.LINGER, 0)
            if len(ports) > at:
                socket.bind(f"tcp://127.0.0.1:{ports[at]}")
            else:
                ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
        publisher = Publisher((events, replays), clock, buffer)
        answering = asyncio.create_task(publisher.answer_replays())
        try:
            yield publisher
        finally:
            answering.cancel()


def stored(tokens: Sequence[int], begin: int = 0, salt: str | None = None, size: int = SIZE) -> dict[str, object]:
    """Return the event of the blocks of a prompt from number `begin` on."""
    names = [repr((salt, tuple(tokens[:end]))).encode() for end in range(size, len(tokens) + 1, size)]
    return {
        "type": "BlockStored",
        "block_hashes": names[begin:],
        "parent_block_hash": names[begin - 1] if begin else None,
        "token_ids": list(tokens[begin * size : len(names) * size]),
        "block_size": size,
        "medium": "GPU",
        "extra_keys": [[salt] if salt and not begin else None] + [None] * (len(names) - begin - 1),
    }


def removed(tokens: Sequence[int], salt: str | None = None) -> dict[str, object]:
    """Return the event of a block that left, the last one of these tokens."""
    return {"type": "BlockRemoved", "block_hashes": [repr((salt, tuple(tokens))).encode()], "medium": "GPU"}

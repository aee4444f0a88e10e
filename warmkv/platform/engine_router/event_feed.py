"""KV events of a server that runs elsewhere: what is in its cache, through restarts of it and of the network."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from warmkv.platform.engine_router.prompts import root_of
from warmkv.replicas.engines.event_stream import Batch, EventStream
from warmkv.replicas.engines.kv_events import (
    FULL_ATTENTION,
    BlocksStored,
    Changes,
    Cleared,
    Forgotten,
    KVEvent,
    VllmBlocks,
)
from warmkv.replicas.engines.zmq_events import batches, replayed

log = logging.getLogger(__name__)

MOST_WAITING = 10_000  # batches that have arrived; the publisher keeps or drops what comes while they wait
LARGEST = 64 << 20  # bytes of a batch
HEARTBEAT_MS, SILENT_MS = 5_000, 15_000  # by which a host that is gone is noticed
RETRY_SECONDS = 1.0
SILENT_ANSWERS = 32  # of a server that told of no event meanwhile: it publishes none, or elsewhere

Told = Callable[[Changes, bool], None]
"""What changed in a server's cache, and whether all of its cache is known now."""


RANKS = "ranks="


class Endpoints(NamedTuple):
    """Name where a server publishes its events and, if it has one, its replay buffer."""

    events: str
    replay: str = ""
    ranks: int = 1  # data-parallel ones of the server, each of which publishes by itself

    def of_rank(self, rank: int) -> Endpoints:
        """Return where a rank publishes: vLLM adds its number to the ports."""
        return Endpoints(_later_port(self.events, rank), _later_port(self.replay, rank))


def _later_port(address: str, more: int) -> str:
    if not address or not more:
        return address
    before, _, port = address.rpartition(":")
    return f"{before}:{int(port) + more}"


def endpoints_of(text: str) -> Endpoints:
    """Read `tcp://HOST:PORT[,tcp://HOST:PORT][,ranks=N]`. Raises ValueError."""
    found, ranks = text.split(","), 1
    if found[-1].startswith(RANKS):
        number = found.pop().removeprefix(RANKS)
        if not number.isdecimal() or not (ranks := int(number)):
            raise ValueError(f"{RANKS}{number} is no number of data-parallel ranks")
        if ranks > 1 and not all(address.startswith("tcp:") for address in found):
            raise ValueError(f"{text!r}: ranks are told apart by the port of a tcp address")
    for address in found:
        parts = urlsplit(address)
        if not (parts.scheme == "tcp" and parts.hostname and parts.port) and not (parts.scheme == "ipc" and parts.path):
            raise ValueError(f"{address!r} is no address of events, as in tcp://gpu-1:5557")
    if not 1 <= len(found) <= 2:
        raise ValueError(f"{text!r} does not have an address of events and one of their replay at most")
    return Endpoints(found[0], found[1] if len(found) > 1 else "", ranks)


class EventFeed:
    """Follow the events of one server's cache. `block_size` is that of keys, a multiple of the server's."""

    def __init__(self, engine: str, endpoints: Endpoints, block_size: int, told: Told) -> None:
        self._engine, self._endpoints, self._size, self._told = engine, endpoints, block_size, told
        self._blocks = VllmBlocks(block_size, root_of)
        self._stream = EventStream(self._take, self._replay)
        self._lock = asyncio.Lock()  # a replay awaits, and what comes meanwhile comes later
        self._context: Any = None
        self._refused = 0  # tokens in its blocks, of which keys are no multiple
        self.loras: set[str] = set()  # adapters, whose prompts have other blocks
        self.arrived = 0  # batches
        self.disconnects = 0
        self._answers = 0

    def answered(self) -> None:
        """Note that the server answered a request; say once where it goes on without an event."""
        self._answers += 1
        if self._answers == SILENT_ANSWERS and not self.arrived:
            log.warning(
                "%s has answered %d requests and told of no KV event at %s: it is routed to by what it was sent",
                *(self._engine, self._answers, self._endpoints.events),
            )

    @property
    def figures(self) -> dict[str, int | bool]:
        """Return what came, and whether all of the server's cache is known."""
        return {
            "whole": self._blocks.whole and not self._refused,
            "batches": self.arrived,
            "lost": self._stream.resets,
            "disconnects": self.disconnects,
        }

    async def follow(self) -> None:
        """Follow the events until cancelled, whatever goes wrong with them."""
        while True:
            try:
                await self._connected()
            except Exception:
                log.exception("KV events of %s cannot be followed", self._engine)
            await asyncio.sleep(RETRY_SECONDS)

    async def _connected(self) -> None:
        import zmq
        import zmq.asyncio

        with zmq.asyncio.Context() as self._context, self._context.socket(zmq.SUB) as socket:
            socket.set_hwm(MOST_WAITING)
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.MAXMSGSIZE, LARGEST),
                (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
                (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
            ):
                socket.setsockopt(option, value)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.subscribe(b"")
            self._stream.disconnected()
            socket.connect(self._endpoints.events)
            watching = asyncio.create_task(self._watch(monitor))
            try:
                async for batch in batches(socket):
                    async with self._lock:
                        self.arrived += 1
                        await self._stream.arrived(*batch)
            finally:
                watching.cancel()
                socket.disable_monitor()

    async def _watch(self, monitor: Any) -> None:
        from zmq.utils.monitor import recv_monitor_message

        while True:
            await recv_monitor_message(monitor)
            async with self._lock:
                self.disconnects += 1
                log.warning(
                    "the connection to KV events of %s ended: what it holds is not known any more", self._engine
                )
                self._stream.disconnected()

    async def _replay(self, first: int) -> Sequence[Batch]:
        if not self._endpoints.replay:
            return ()
        return await replayed(self._context, self._endpoints.replay, first)

    def _take(self, events: Sequence[KVEvent]) -> None:
        """Follow the server's cache. Raises MissingEventsError."""
        for event in events:
            if isinstance(event, Cleared | Forgotten):
                self._refused = 0  # what comes next may be of another process, with other blocks
            elif isinstance(event, BlocksStored) and event.token_ids and event.kind in FULL_ATTENTION:
                if event.lora is not None:
                    self.loras.add(event.lora)
                if self._size % event.block_size:
                    self._refuse(event.block_size)
            self._told(self._blocks.apply(Forgotten() if self._refused else event), self._blocks.whole)

    def _refuse(self, size: int) -> None:
        if size != self._refused:
            self._refused = size
            log.error(
                "%s has blocks of %d tokens: set prefix_cache.block_size, now %d, to a multiple of it; "
                "until then its KV events tell nothing",
                *(self._engine, size, self._size),
            )

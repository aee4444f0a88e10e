"""Publish a replica's blocks to the prefix directory: batched, numbered, made whole by a snapshot after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from warmkv.prefixes.index import HEARTBEAT_SECONDS, PUBLISH_SECONDS, Shard
from warmkv.prefixes.mask_table import pack
from warmkv.replicas.protocol import BlockEvents

log = logging.getLogger(__name__)

PENDING_LIMIT = 10_000  # reports that wait for the directory; more are replaced by a snapshot
Send = Callable[[list[BlockEvents], dict[str, Any] | None], Awaitable[bool]]


class Publisher:
    """Collects events in the engine's thread and sends them from the event loop.

    `send(batches, status)` delivers and answers whether the directory could follow; the status is left out where an
    earlier one was sent less than HEARTBEAT_SECONDS ago. `request_snapshot` must make the engine's thread call
    `snapshot` with all full blocks. Events and snapshots keep the order in which the store made
    them, since both are noted by the engine's thread. It tells of the blocks of `shard` alone; `clock` is wall time.
    """

    def __init__(
        self,
        send: Send,
        request_snapshot: Callable[[], None],
        status: Callable[[], dict[str, Any]],
        *,
        clock: Callable[[], float],
        shard: Shard = Shard(),
    ) -> None:
        self._send, self._request_snapshot, self._status = send, request_snapshot, status
        self._clock, self.shard = clock, shard
        self._pending: list[BlockEvents] = []
        self._sequence = 0
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._status_due = 0.0  # by the event loop's clock

    def delta(self, stored: Sequence[bytes], evicted: Sequence[bytes], tier: str) -> None:
        """Report that blocks came to a tier, the fastest that has them, or left all tiers."""
        came, gone = self._mine(stored), self._mine(evicted)
        if came or gone:
            with self._lock:
                self._append(came, gone, tier)

    def snapshot(self, blocks: Mapping[str, Sequence[bytes]]) -> None:
        """Report all blocks that are resident now, by the fastest tier; what was pending before is part of it."""
        with self._lock:
            self._pending.clear()
            for number, (tier, keys) in enumerate(blocks.items()):
                if (mine := self._mine(keys)) or number == 0:
                    self._append(mine, b"", tier, snapshot=number == 0)

    async def run(self) -> None:
        """Send until cancelled, at most every PUBLISH_SECONDS and at least every HEARTBEAT_SECONDS."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        self._request_snapshot()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), HEARTBEAT_SECONDS)
            arrived.clear()
            await self._flush()
            await asyncio.sleep(PUBLISH_SECONDS)

    async def _flush(self) -> None:
        with self._lock:
            batches, self._pending = self._pending, []
        now, status = asyncio.get_running_loop().time(), None
        if now >= self._status_due or any(batch.snapshot for batch in batches):
            self._status_due, status = now + HEARTBEAT_SECONDS, self._status()
        try:
            followed = await self._send(batches, status)
        except Exception as error:  # the actor is restarting; a snapshot makes good what was lost
            log.warning("prefix directory cannot be reached: %s", error)
            followed = False
        if not followed:
            self._request_snapshot()
            await asyncio.sleep(HEARTBEAT_SECONDS)  # it may be away: do not press it, nor the engine

    def _mine(self, keys: Sequence[bytes]) -> bytes:
        return self.shard.part(pack(keys))

    def _append(self, stored: bytes, evicted: bytes, tier: str, snapshot: bool = False) -> None:
        if len(self._pending) >= PENDING_LIMIT:  # the directory is away: the gap will make it ask for a snapshot
            self._pending.clear()
        self._pending.append(BlockEvents(self._sequence, stored, evicted, snapshot, tier, self._clock()))
        self._sequence += 1
        self._wake()

"""Following a numbered stream of KV events: gaps are healed by replay or, where that is too late, by starting over."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from warmkv.replicas.engines.kv_events import Cleared, KVEvent, MissingEventsError, decode

log = logging.getLogger(__name__)

Batch = tuple[int, bytes]
"""Its number, which grows by one from 0, and its events as they were sent."""


class EventStream:
    """Gives the events of batches to `take`, each once and in order.

    `replay(first)` returns the batches from a number on that are still to be had. Where one is lost for good, or `take`
    misses some, everything is forgotten and `reset` must have the engine clear its cache: what it tells of behind that
    is whole again.
    """

    def __init__(
        self,
        take: Callable[[Sequence[KVEvent]], None],
        replay: Callable[[int], Awaitable[Sequence[Batch]]],
        reset: Callable[[], Awaitable[None]],
    ) -> None:
        self._take, self._replay, self._reset = take, replay, reset
        self._next = 0
        self._clearing = False  # until the engine tells that it has cleared its cache
        self.resets = 0

    async def arrived(self, number: int, payload: bytes) -> None:
        """Take a batch, and those that are missing before it."""
        batches: Sequence[Batch] = [(number, payload)]
        if number > self._next:
            log.warning("KV events %d to %d did not arrive", self._next, number - 1)
            batches = [*(batch for batch in await self._replay(self._next) if batch[0] < number), *batches]
        for at, found in batches:
            if at < self._next:
                continue
            try:
                if at > self._next:
                    raise MissingEventsError(f"KV events {self._next} to {at - 1} are lost")
                self._next = at + 1
                self._follow(decode(found))
            except Exception as error:  # whatever cannot be followed: what is known may be wrong now
                self._next = at + 1
                await self._start_over(error)

    def _follow(self, events: Sequence[KVEvent]) -> None:
        if self._clearing:
            cleared = next((at for at, event in enumerate(events) if isinstance(event, Cleared)), None)
            if cleared is None:
                return
            self._clearing, events = False, events[cleared:]
        self._take(events)

    async def _start_over(self, error: Exception) -> None:
        lost = isinstance(error, MissingEventsError)
        log.warning("the engine's prefix cache is cleared: what it holds is not known any more", exc_info=not lost)
        self._take([Cleared()])
        self._clearing = True
        self.resets += 1
        await self._reset()

"""Following a numbered stream of KV events: gaps are healed by replay or, where that is too late, by starting over."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from warmkv.replicas.engines.kv_events import Cleared, Forgotten, KVEvent, MissingEventsError, decode, sent_at

log = logging.getLogger(__name__)

Batch = tuple[int, bytes]
"""Its number, which grows by one from 0, and its events as they were sent."""


class EventStream:
    """Gives the events of batches to `take`, each once and in order.

    `replay(first)` returns the batches from a number on that are still to be had. Where one is lost for good, or `take`
    misses some, everything is forgotten. If there is a `reset`, it must have the engine clear its cache: what it tells
    of behind that is whole again. Without one, what is told later is only a part of what the engine holds.

    An engine that begins anew is known by its numbers, which fall while its time goes on, or by `disconnected`.
    """

    def __init__(
        self,
        take: Callable[[Sequence[KVEvent]], None],
        replay: Callable[[int], Awaitable[Sequence[Batch]]],
        reset: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._take, self._replay, self._reset = take, replay, reset
        self._next = 0
        self._last = b""  # batch that was followed, of which the time counts
        self._clearing = False  # until the engine tells that it has cleared its cache
        self.resets = 0

    async def arrived(self, number: int, payload: bytes) -> None:
        """Take a batch, and those that are missing before it."""
        if number < self._next:
            if not _later(payload, self._last):
                return  # it came twice, or late
            log.warning("KV events begin anew: the engine has restarted")
            self.disconnected()
        batches: Sequence[Batch] = [(number, payload)]
        if number > self._next:
            if self._next:
                log.warning("KV events %d to %d did not arrive", self._next, number - 1)
            batches = [*(batch for batch in await self._replay(self._next) if batch[0] < number), *batches]
        for at, found in batches:
            if at < self._next:
                continue
            if at > self._next:
                await self._start_over(MissingEventsError(f"KV events {self._next} to {at - 1} are lost"))
            elif not at:
                self._take([Cleared()])  # an engine begins with nothing
            self._next, self._last = at + 1, found
            try:
                self._follow(decode(found))
            except Exception as error:  # whatever cannot be followed: what is known may be wrong now
                await self._start_over(error)

    def disconnected(self) -> None:
        """Forget everything: what comes next may be of another process, whose numbers begin at 0."""
        self._take([Forgotten()])
        self._next, self._last, self._clearing = 0, b"", False

    def _follow(self, events: Sequence[KVEvent]) -> None:
        if self._clearing:
            cleared = next((at for at, event in enumerate(events) if isinstance(event, Cleared)), None)
            if cleared is None:
                return
            self._clearing, events = False, events[cleared:]
        self._take(events)

    async def _start_over(self, error: Exception) -> None:
        lost = isinstance(error, MissingEventsError)
        self.resets += 1
        self._take([Forgotten()])
        if self._reset is None:
            log.warning("what the engine's prefix cache holds is not known any more: %s", error)
            return
        log.warning("the engine's prefix cache is cleared: what it holds is not known any more", exc_info=not lost)
        self._clearing = True
        await self._reset()


def _later(payload: bytes, last: bytes) -> bool:
    """Tell if a batch was sent after another one, by the engine's clock."""
    try:
        return sent_at(payload) > sent_at(last)
    except ValueError:
        return False

"""From a gateway to the what-if service: what the access log says, in batches that no request waits for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from warmkv.platform.whatif.window import RequestWindow
from warmkv.prefixes.record import RequestRecord

log = logging.getLogger(__name__)

QUEUE = 2000  # records that wait for the service; more are dropped, and counted
BATCH = 200  # records in a message
FEED_SECONDS = 1.0  # between two messages
PATIENCE = 10.0  # seconds that a message may take
KEPT, KEPT_BYTES = 1000, 8 << 20  # records that are sent again to a service that was started anew

Send = Callable[[Sequence[RequestRecord], int], Awaitable[float]]
"""Takes records, and how many requests wait for their first token; returns when the service was started."""


class Feed:
    """Queues records and sends them while it runs. `waiting` counts requests that wait for their first token.

    A service that was started anew has lost its window; it gets the latest records again.
    """

    def __init__(self, send: Send, waiting: Callable[[], int], dropped: Callable[[int], None]) -> None:
        self._send, self._waiting, self._dropped = send, waiting, dropped
        self._records: deque[RequestRecord] = deque()
        self._said = 0  # requests that waited, as the service was told last
        self._kept = RequestWindow(KEPT, KEPT_BYTES)  # what was sent
        self._started: float | None = None  # when the service was that it was sent to

    def write(self, record: RequestRecord) -> None:
        """Queue a record; where the queue is full it is dropped and counted. Never waits."""
        if len(self._records) < QUEUE:
            self._records.append(record)
        else:
            self._dropped(1)

    async def run(self) -> None:
        """Send what is queued once a second, until cancelled."""
        while True:
            await asyncio.sleep(FEED_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Send what is queued, batch by batch; a batch that cannot be sent is dropped and counted."""
        while self._records or self._waiting() or self._said:
            batch = list(islice(self._records, BATCH))
            for _ in batch:
                self._records.popleft()
            self._said = self._waiting()
            try:
                async with asyncio.timeout(PATIENCE):
                    started = await self._send(batch, self._said)
                if self._started not in (None, started):
                    self._records.extendleft(reversed(self._kept.records()))
                    self._kept = RequestWindow(KEPT, KEPT_BYTES)
                self._started = started
            except Exception as error:  # it is restarting
                log.warning("the what-if service cannot be reached: %s", error)
                self._dropped(len(batch))
                return
            finally:
                self._kept.add(batch)
            if not self._records:
                return

"""How many requests a gateway has open at most, and when a client that was refused should try again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from warmkv.config import Config
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.paths import of_operators, path_of

SHORTEST, LONGEST = 1, 60  # seconds that a refusal may name


class Backlog:
    """Requests that wait, and how fast they are served: an estimate of the time until those of now are.

    `clock` gives seconds. The pace is the mean time between two that are served while any wait, over the last
    `memory` of them, or the time since the last one if that is longer.
    """

    def __init__(self, clock: Callable[[], float], memory: int = 32) -> None:
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=memory)
        self._last = clock()  # when the last one was served, or the first one came to an empty queue
        self.waiting = 0

    def joined(self) -> None:
        """Count a request that waits from now on."""
        if not self.waiting:
            self._last = self._clock()
        self.waiting += 1

    def left(self, *, served: bool) -> None:
        """Count a request that waits no more: it was served, or it was given up."""
        self.waiting -= 1
        if served:
            now = self._clock()
            self._intervals.append(now - self._last)
            self._last = now

    def retry_after(self) -> float:
        """Return the seconds until all who wait are served, at the recent pace, within SHORTEST and LONGEST."""
        if not self.waiting:
            return SHORTEST
        mean = sum(self._intervals) / len(self._intervals) if self._intervals else SHORTEST
        return min(LONGEST, max(SHORTEST, self.waiting * max(mean, self._clock() - self._last)))


def retry_header(seconds: float) -> str:
    """Return the value of a Retry-After header: whole seconds, at least SHORTEST (RFC 9110, 10.2.3)."""
    return str(max(SHORTEST, math.ceil(seconds)))


def most_open(config: Config) -> int:
    """Return the most requests that a gateway has open: those in replicas, those that wait, and those being parsed."""
    groups = config.groups().values()
    in_replicas = sum(group.ongoing_requests * group.cluster.most_replicas for group in groups)
    return in_replicas + 2 * config.cluster.max_queued_requests


class OpenRequests:
    """ASGI middleware: while `most` requests with a body are open, from header to end of answer, others are refused.

    Operators' requests are neither counted nor refused: an overload is when the policy may have to change.
    """

    def __init__(
        self, app: ASGIApp, most: int, backlog: Backlog, refuse: Callable[[Request, ApiError], Response]
    ) -> None:
        self._app, self._most, self._backlog, self._refuse = app, most, backlog, refuse
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["method"] in ("POST", "PUT") and not of_operators(path_of(scope))
        if not counts:
            await self._app(scope, receive, send)
        elif self._open >= self._most:
            error = ApiError(
                "overloaded_error",
                f"{self._open} requests are open, as many as this gateway takes "
                "(engine.max_slots, engine.max_queue, cluster.max_queued_requests).",
                reason="open_requests",
                retry_after=self._backlog.retry_after(),
            )
            await self._refuse(Request(scope), error)(scope, receive, send)
        else:
            self._open += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._open -= 1

"""A request between its admission by a replica and its first token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from warmkv.platform.gateway.apis.answer import Answer, Status
from warmkv.platform.gateway.apis.errors import ApiError, from_exception
from warmkv.replicas.protocol import Admitted, Event, Started


class SubmittedRequest:
    """A request that was sent: `queued` waits for a replica's queue to take it, `begin` for its first token.

    `began` makes the answer of Started. `gone` is called exactly once if there is none, with the type of the error if
    the request failed. `report` counts and logs an error that the client gets within a stream. It fails at the
    `deadline`, a time of the loop.
    """

    def __init__(
        self,
        id_: str,
        events: AsyncGenerator[Event],
        began: Callable[[Started], Answer],
        gone: Callable[[Status, str], None],
        report: Callable[[BaseException], ApiError],
        deadline: float,
    ) -> None:
        self.id, self.report, self.deadline = id_, report, deadline
        self._events, self._began, self._gone = events, began, gone
        self._started: Started | None = None
        self._answer: Answer | None = None
        self._over = False

    async def queued(self) -> None:
        """Wait until a replica has queued the request. Raises ApiError while an HTTP status can still be given."""
        try:
            event = await anext(self._events)
            if isinstance(event, Started):
                self._started = event
            elif not isinstance(event, Admitted):
                raise ApiError("api_error", "The replica sent text before it started.")
        except Exception as error:
            told = from_exception(error)
            self._end("error", told.type)
            raise told from error
        except BaseException:
            self._end("cancelled")
            raise

    async def begin(self) -> Answer:
        """Wait for the first token. Raises ApiError."""
        while self._started is None:
            await self.queued()
        self._over = True
        self._answer = self._began(self._started)
        return self._answer

    async def aclose(self) -> None:
        """Give the request up, if its answer has not ended."""
        if self._answer is not None:
            await self._answer.aclose()
            return
        self._end("cancelled")
        await self._events.aclose()

    def _end(self, status: Status, error: str = "") -> None:
        if not self._over:
            self._over = True
            self._gone(status, error)

"""Serve the requests that gateways send to a replica, each from its order to its last event. Without Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from llguidance import LLMatcher

from warmkv import logs
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.engine.outputs import Output, OutputProcessor
from warmkv.replicas.engines.interface import Fetching
from warmkv.replicas.links import Link
from warmkv.replicas.protocol import (
    STOPPING,
    Admitted,
    Failed,
    Finished,
    GenerateRequest,
    QueueFullError,
    Refused,
    Started,
    UnservableRequestError,
)

log = logging.getLogger(__name__)


class OngoingRequest:
    """Hold a request being served: a task while its prefix is fetched or its constraint compiled, then an output."""

    __slots__ = ("output", "preparing")

    def __init__(self) -> None:
        self.output: Output | None = None
        self.preparing: asyncio.Task[None] | None = None


class Answers:
    """Serve the orders of all links, at most `most` requests at a time, in one event loop.

    `check` raises if the engine hangs, which a gateway would find out too late.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        transfers: Fetching,
        check: Callable[[], None],
        most: int,
        compiler: Compiler | None = None,
    ) -> None:
        self._outputs, self._transfers, self._check, self._most = outputs, transfers, check, most
        self._compiler = compiler
        self._open: dict[tuple[Link, int], OngoingRequest] = {}
        self._drained: asyncio.Event | None = None  # once it is stopped

    @property
    def ongoing(self) -> int:
        """Return the number of ongoing requests."""
        return len(self._open)

    def take(self, link: Link, stream: int, request: GenerateRequest | None) -> None:
        """Begin a request, whose events go back under its stream number, or cancel it (None). Does not raise."""
        if request is None:
            self._cancel(link, stream)
            return
        if self._drained is not None or len(self._open) >= self._most:
            link.send(stream, Refused("busy"))
            return
        self._open[link, stream] = answer = OngoingRequest()
        with logs.about(request.context):
            if self._transfers.helps(request) or request.sampling.constraint is not None:
                answer.preparing = asyncio.create_task(self._prepare(link, stream, request, answer))
            else:
                self._submit(link, stream, request, answer)

    def lost(self, link: Link) -> None:
        """Cancel the requests of a lost link."""
        for of, stream in [key for key in self._open if key[0] is link]:
            self._cancel(of, stream)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait until the ongoing ones have ended, for `seconds` at most."""
        self._drained = asyncio.Event()
        if self._open:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._drained.wait()

    async def give_up(self) -> None:
        """Fail what `drain` has left as an engine does that is stopped, so that gateways resume it elsewhere."""
        if self._drained is None or not self._open:
            return
        log.warning("%d answers have not ended in time: they go on elsewhere", len(self._open))
        for (link, stream), answer in tuple(self._open.items()):
            if answer.preparing is not None:
                answer.preparing.cancel()
                self._end(link, stream, STOPPING)
            elif answer.output is not None:
                self._outputs.fail(answer.output, STOPPING)
        await self._drained.wait()

    async def _prepare(self, link: Link, stream: int, request: GenerateRequest, answer: OngoingRequest) -> None:
        matcher: LLMatcher | Exception | None = None
        if (constraint := request.sampling.constraint) is not None and self._compiler is not None:
            try:
                matcher = await asyncio.to_thread(self._compiler.matcher, constraint)
            except Exception as error:
                matcher = error
        if self._transfers.helps(request):
            try:
                await self._transfers.prepare(request)
            except Exception:
                log.exception("a request's prefix could not be fetched and is computed")
        answer.preparing = None
        self._submit(link, stream, request, answer, matcher)

    def _submit(
        self,
        link: Link,
        stream: int,
        request: GenerateRequest,
        answer: OngoingRequest,
        matcher: LLMatcher | Exception | None = None,
    ) -> None:
        """Submit a request with its constraint's matcher, or refuse it with the error of compiling that."""
        try:
            if isinstance(matcher, Exception):
                raise matcher
            self._check()
            deliver = partial(link.send, stream)
            answer.output = output = self._outputs.submit(request, deliver, Admitted(len(self._open)), matcher)
        except QueueFullError as error:
            self._end(link, stream, Refused("full", str(error), error.waiting, error.retry_after))
        except UnservableRequestError as error:
            self._end(link, stream, Refused("unservable", str(error)))
        except Exception as error:
            log.exception("a request could not be submitted")
            self._end(link, stream, Failed(f"{type(error).__name__}: {error}"))
        else:
            output.started.add_done_callback(partial(self._started, request))
            output.ended.add_done_callback(partial(self._ended, link, stream, output))

    def _started(self, request: GenerateRequest, future: asyncio.Future[Started | None]) -> None:
        if (started := future.result()) is not None:
            self._transfers.started(request, started)
            log.info(
                "answer begins: prompt_tokens=%d cached_tokens=%d queue_seconds=%.3f prefill_seconds=%.3f",
                len(request.token_ids),
                started.cached_tokens,
                started.queue_seconds,
                started.prefill_seconds,
            )

    def _ended(self, link: Link, stream: int, output: Output, future: asyncio.Future[Finished | Failed]) -> None:
        self._outputs.cancel(output)
        if future.cancelled():
            self._end(link, stream, Finished("cancelled", output.num_output_tokens))
        elif (error := future.exception()) is not None:
            log.error("answer failed", exc_info=error)
            self._end(link, stream, Failed(f"{type(error).__name__}: {error}"))
        else:
            if isinstance(end := future.result(), Failed):
                refused = end.fault == "refused"  # the client's doing
                log.log(logging.INFO if refused else logging.ERROR, "answer failed: %s", end.message)
            self._end(link, stream, None)

    def _cancel(self, link: Link, stream: int) -> None:
        """Abort a request; its end is sent once the engine has freed it. Does nothing if it has ended."""
        answer = self._open.get((link, stream))
        if answer is None:
            return
        if answer.preparing is not None:
            answer.preparing.cancel()
            self._end(link, stream, Finished("cancelled", 0))
        elif answer.output is not None:
            self._outputs.cancel(answer.output)

    def _end(self, link: Link, stream: int, event: Finished | Failed | Refused | None) -> None:
        """Forget a request; send `event` if its end was not delivered yet."""
        if event is not None:
            link.send(stream, event)
        del self._open[link, stream]
        if self._drained is not None and not self._open:
            self._drained.set()

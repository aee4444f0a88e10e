"""Failover: resend a failed request to another replica, which resumes where it stopped. Without Ray.

Tokens are drawn from the request's seed alone, so a replica that takes the tokens of another as its own (`resume` of
a request) comes to the same cache, the same random numbers and the same text. What the client has is left out of it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from warmkv.config import GatewayConfig, Needs, RoutingConfig
from warmkv.platform.gateway.apis.errors import ReplicaFailedError, RequestFailedError, from_exception, retry_after
from warmkv.policies.breaker import Outcome, retry_pause
from warmkv.replicas.protocol import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    PromptLogprobs,
    QueueFullError,
    Started,
    TokenLogprobs,
    UnservableRequestError,
)

FAULTS: dict[str, type[Exception]] = {
    "replica": ReplicaFailedError,
    "request": RequestFailedError,
    "refused": UnservableRequestError,
}
"""What is raised for a Failed, by its `fault`."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One sending of a request. The gateway and its router share it; what goes to the replica is the request."""

    request: GenerateRequest
    given_up: tuple[Attempt, ...] = ()  # those before it
    routing: RoutingConfig | None = None  # in force when the request came; that of the start if absent
    replica: str | None = None  # where the router sent it
    booking: int | None = None  # what the router calls it
    groups: frozenset[str] = frozenset()  # of replicas that can compute it
    others: int = 0  # replicas that it was not sent to yet
    began: Callable[[int], None] = lambda cached: None  # tells the router how many tokens were warm, now it is computed
    ended: Callable[[Outcome], None] = lambda outcome: None  # tells the router how it ended
    loses_penalties: bool = False  # it may go where those on what was drawn are lost
    take: Callable[[Delta], bool] = lambda delta: False  # of text: whether it was passed on at once

    @property
    def needs(self) -> Needs:
        """Return what a replica must be able to do for it."""
        needs = self.request.needs
        return replace(needs, resumed_penalties=False) if self.loses_penalties else needs


@dataclass(slots=True, eq=False)
class Sink:
    """Where text goes as it comes, without a task that is woken for it. While there is no `take`, it is yielded.

    `restart` forgets the text that came, as the answer is computed again from its start; there is none once the client
    may have some of it. Log-probabilities of the prompt are collected here; they are whole when the answer has started.
    """

    take: Callable[[Delta], None] | None = None
    restart: Callable[[], None] | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    progress: AnswerProgress | None = None  # of the answer, since it was sent


@dataclass(slots=True, eq=False)
class AnswerProgress:
    """What the client has of an answer, and what the attempts have made of it."""

    sent: int = 0  # characters
    output_ids: list[int] = field(default_factory=list)  # of the attempt that got furthest
    own: list[int] = field(default_factory=list)  # of the attempt that runs
    length: int = 0  # its characters
    heard: float = 0.0  # when something came last

    def begin(self) -> None:
        """Note that another attempt begins."""
        self.own, self.length = [], 0

    def restart(self) -> None:
        """Note that the client has nothing, after all: the next attempt begins at the start."""
        self.sent, self.output_ids = 0, []

    def missing(self, delta: Delta) -> Delta | None:
        """Note text of the attempt, and return what of it the client lacks."""
        known = max(0, len(self.output_ids) - len(self.own))  # tokens of the text that the client has
        self.own += delta.tokens
        if len(self.own) > len(self.output_ids):
            self.output_ids = self.own
        self.length += len(delta.text)
        new = self.length - self.sent
        if new <= 0:
            return None
        self.sent = self.length
        if new >= len(delta.text):
            return delta
        return replace(delta, text=delta.text[-new:], logprobs=delta.logprobs[known:])


class Events(Protocol):
    """What comes of an attempt, until `aclose` gives it up."""

    async def __anext__(self) -> Event: ...
    async def aclose(self) -> None: ...


Send = Callable[[Attempt], Events]


async def resumed(
    request: GenerateRequest,
    send: Send,
    config: GatewayConfig,
    retried: Callable[[str], None],
    deadline: float = math.inf,
    routing: RoutingConfig | None = None,
    sink: Sink | None = None,
) -> AsyncGenerator[Event]:
    """Yield the events of an answer from as many replicas as needed: one Admitted, one Started, text, one Finished.

    Text that `sink` takes is not yielded.

    A replica that fails is replaced by another, up to `gateway.retries` times; `retried` hears whether the answer had
    begun ("streaming") or not ("waiting"). One that is full is passed over ("full") as long as there are others. What
    is the request's own fault is not tried again. An answer that no replica goes on with is computed from its start
    where `sink` can `restart`; else it goes on without the penalties on what was drawn, if that is all that is lacking.
    Raises what the last replica raised, ReplicaFailedError where it raised nothing; if all are full, the
    QueueFullError of the one that expects to have room first; TimeoutError at the `deadline`, a time of the loop.
    """
    clock, silence = asyncio.get_running_loop().time, config.stall_seconds
    admitted, started, progress = False, False, AnswerProgress()
    if sink is not None:
        sink.progress = progress

    def take(delta: Delta) -> bool:
        if sink is None or sink.take is None:
            return False
        progress.heard = clock()
        if (new := progress.missing(delta)) is not None:
            sink.take(new)
        return True

    attempts: tuple[Attempt, ...] = ()
    failed, loses_penalties = 0, False
    full: list[Exception] = []
    while True:
        sent = request
        if attempts:  # under another name: a replica may still know the one before
            sent = replace(request, id=f"{request.id}~{len(attempts)}", resume=tuple(progress.output_ids))
        attempt = Attempt(sent, attempts, routing, loses_penalties=loses_penalties, take=take)
        progress.begin()
        if sink is not None and not started:
            sink.prompt_logprobs.clear()
        outcome: Outcome = "none"
        try:
            async with aclosing(send(attempt)) as events:
                while not isinstance(event := await _next(events, attempt, progress, silence, deadline), Finished):
                    if isinstance(event, Admitted):
                        if not admitted:
                            admitted = True
                            yield event
                    elif isinstance(event, PromptLogprobs):
                        if sink is not None and not started:
                            sink.prompt_logprobs += event.logprobs
                    elif isinstance(event, Started):
                        attempt.began(event.cached_tokens)
                        if not started:
                            started = True
                            yield event
                    elif isinstance(event, Delta) and (new := progress.missing(event)) is not None:
                        yield new
                outcome = "ok"
                yield event
                return
        except Exception as error:
            attempts += (attempt,)
            if isinstance(error, UnservableRequestError) and sent.resume:  # it was taken, but cannot be gone on with
                if sink is not None and sink.restart is not None:
                    progress.restart()
                    sink.restart()
                elif loses_penalties:
                    raise ReplicaFailedError(str(error)) from error
                else:
                    loses_penalties = True
                continue
            if isinstance(error, QueueFullError):
                full.append(error)
                if not attempt.others:
                    raise min(full, key=_room_after) from None
                retried("full")
                continue
            if not _is_replicas_fault(error):
                raise
            outcome = "failed"
            failed += 1
            if failed > config.retries:
                raise
        finally:
            attempt.ended(outcome)
        retried("streaming" if started else "waiting")
        if pause := retry_pause(failed):
            await asyncio.sleep(min(pause, deadline - clock()))


def _is_replicas_fault(error: Exception) -> bool:
    return from_exception(error).type == "api_error" and not isinstance(error, RequestFailedError)


def _room_after(error: Exception) -> float:
    seconds = retry_after(error)
    return math.inf if seconds is None else seconds


async def _next(events: Events, attempt: Attempt, progress: AnswerProgress, silence: float, deadline: float) -> Event:
    """Return the next event.

    Raises ReplicaFailedError where there is none, or nothing comes within `silence` seconds from the replica that has
    the attempt, RequestFailedError where the request cannot be computed, UnservableRequestError where it is refused,
    TimeoutError at the `deadline`.
    """
    clock = asyncio.get_running_loop().time
    progress.heard = clock()
    while True:
        stalled, waits = progress.heard + silence, attempt.replica is None
        try:
            async with asyncio.timeout_at(min(stalled, deadline)) as waiting:
                event = await anext(events, None)
            break
        except TimeoutError:
            if not waiting.expired() or stalled >= deadline:
                raise
            if waits or attempt.replica is None:  # it was not sent yet, so no replica is silent: it keeps its place
                progress.heard = clock()
            elif stalled == progress.heard + silence:  # else text was taken meanwhile
                raise ReplicaFailedError(f"it was silent for {silence:g} s") from None
    if event is None:
        raise ReplicaFailedError("it ended the answer early")
    if isinstance(event, Failed):
        raise FAULTS[event.fault](event.message)
    if isinstance(event, Finished) and event.reason == "cancelled":  # not by us: we would not be listening
        raise ReplicaFailedError("it gave the answer up")
    return event

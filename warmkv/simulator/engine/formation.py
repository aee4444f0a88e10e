"""How an engine forms its batches: the interface, and what every way of forming them shares.

A formation is a state machine in virtual time. Its owner puts requests into `waiting` and tells `arrived`; the
formation asks by `wake` for the time at which the steps that it began are over, and goes on when `resume` is called
with that time. An arrival may make that time earlier: a run of many steps ends with the first step that it joins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from warmkv.simulator.engine.batch import DecodeBatch
from warmkv.simulator.steps.costs import Line, run_seconds, steps_until

NEVER: Final = -1.0
"""The time of what has not happened to a request."""


class EngineRequest(Protocol):
    """A request as an engine sees it."""

    prompt: int  # tokens
    output: int  # tokens to draw
    computed: int  # tokens that have KV; not kept up to date while the request decodes


Request = TypeVar("Request", bound=EngineRequest)
Told = TypeVar("Told", bound=EngineRequest, contravariant=True)


class Owner(Protocol[Told]):
    """Keep the prefix cache and the accounts of an engine, which calls these as it goes."""

    def begin(self, request: Told, now: float) -> float:
        """Set `computed` of an admitted request to the tokens whose KV is there; return the seconds to read them."""
        ...

    def prompt_computed(self, request: Told, now: float) -> None:
        """Record that the prompt has its KV and the request its next token."""
        ...

    def preempted(self, request: Told, now: float) -> None:
        """Record that the request lost its KV and waits to be computed again."""
        ...

    def end(self, request: Told, now: float) -> None:
        """Record that the request has all its tokens."""
        ...


class BatchFormation(ABC, Generic[Request]):
    """Form the batches of one engine. `fast_forward=False` takes every decode step by itself, with equal results."""

    def __init__(self, owner: Owner[Request], wake: Callable[[float], object], fast_forward: bool) -> None:
        self._owner, self._wake, self._fast_forward = owner, wake, fast_forward
        self.batch: DecodeBatch[Request] = DecodeBatch()
        self._idle = True
        self._run_since, self._run_steps = 0.0, 0  # a run of steps that are alike
        self._run_lines: Sequence[Line] = ()
        self._run_ends: Sequence[float] = ()  # of its steps, if they are not alike
        life = self._steps()
        next(life)
        self.resume = life.send

    @abstractmethod
    def _steps(self) -> Generator[None, float, None]:
        """Begin and end steps; wait at every `yield` for the time that was asked for, or idle for a request."""

    @property
    @abstractmethod
    def running(self) -> list[Request]:
        """Return the requests that are admitted and have not ended."""

    @abstractmethod
    def ever_fits(self, request: Request) -> bool:
        """Return True if the engine could serve a request by itself."""

    @abstractmethod
    def _joins(self, request: Request) -> bool:
        """Return True if a request that arrives during a run of steps may end it."""

    def arrived(self, request: Request, now: float) -> None:
        """Notice a request that has just been put into `waiting`."""
        if self._idle:
            self._idle = False
            self._wake(now)
        elif self._run_steps and self._joins(request):
            self.cut(now)

    def cut(self, now: float) -> None:
        """End a run of steps with the one that is in progress: who waits may be admitted with the next."""
        most, ends = self._run_steps, self._run_ends
        if most <= 1:
            return
        steps = 1 + bisect_left(ends, now) if ends else steps_until(self._run_lines, self._run_since, now, most)
        if steps < most:
            self._run_steps = steps
            end = ends[steps - 1] if ends else self._run_since + run_seconds(self._run_lines, steps)
            self._wake(max(now, end))

    def _run(self, now: float, steps: int, lines: Sequence[Line]) -> None:
        """Begin a run of steps of these lines, which `_run_steps` counts: fewer, if a request joins."""
        self._run_lines, self._run_since, self._run_steps, self._run_ends = lines, now, steps, ()
        self._wake(now + run_seconds(lines, steps))

    def _run_to(self, ends: Sequence[float]) -> None:
        """Begin a run of steps that end at these times, likewise."""
        self._run_steps, self._run_ends = len(ends), ends
        self._wake(ends[-1])

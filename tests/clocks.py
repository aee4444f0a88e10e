"""Event loops whose clock is the test's, so that time-outs and pauses take no time and never come too early."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer whenever nothing is ready. For scenarios without threads."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self._advance))

    def time(self) -> float:
        return self._now

    def stand_still(self, seconds: float) -> None:
        """Let `seconds` pass in which nothing runs, as in a call that blocks."""
        self._now += seconds

    def _advance(self, seconds: float) -> None:
        self._now += seconds


class _Jumping(selectors.DefaultSelector):
    """A selector that never waits: it advances the clock instead."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and there is no timer to jump to"
        self._advance(max(timeout, 0.0))
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop in real time, of which a test may skip some. For scenarios with threads."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped

    def skip(self, seconds: float) -> None:
        """Let `seconds` pass at once. From another thread: `call_soon_threadsafe(loop.skip, seconds)`."""
        self.skipped += seconds


def skip(seconds: float) -> None:
    """Let `seconds` pass at once on the running SkippingLoop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skip(seconds)


def run(scenario: Coroutine[Any, Any, T], loop: Callable[[], asyncio.AbstractEventLoop] = VirtualLoop) -> T:
    """Run a scenario in an event loop of a kind, in virtual time by default."""
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(scenario)

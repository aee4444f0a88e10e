"""Queue requests and actions for the engine's thread, in one order, so that a cancel never overtakes its request."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")
T = TypeVar("T")
Action = Callable[[], None]


class ClosedError(RuntimeError):
    """The engine has ended; it takes nothing any more."""


class Inbox(Generic[Item]):
    """A queue of arrivals and actions. Any thread puts; one takes, and gives arrivals to `arrive` in their order."""

    def __init__(self, arrive: Callable[[Item], None]) -> None:
        self._arrive = arrive
        self._queue: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self.arriving = 0  # items that are in the queue

    def submit(self, item: Item, check: Callable[[int], None]) -> None:
        """Queue an arrival unless `check`, called with the number of those queued, raises.

        Raises ClosedError after `close`, and what `check` raises. No other arrival comes or leaves meanwhile.
        """

        def arrive() -> None:
            with self._lock:
                self.arriving -= 1
                self._arrive(item)

        with self._lock:
            if self._closed:
                raise ClosedError("the engine has ended")
            check(self.arriving)
            self.arriving += 1
            self._queue.put(arrive)

    def put(self, action: Action) -> None:
        """Queue an action. Raises ClosedError after `close`."""
        with self._lock:
            if self._closed:
                raise ClosedError("the engine has ended")
            self._queue.put(action)

    def result_of(self, action: Callable[[], T]) -> Future[T]:
        """Queue an action and return its future; if that is cancelled before, the action is not run."""
        result: Future[T] = Future()

        def act() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(action())
            except Exception as error:
                result.set_exception(error)

        try:
            self.put(act)
        except ClosedError as error:
            result.set_exception(error)
        return result

    def wake(self) -> None:
        """End a `wait`."""
        self._queue.put(None)

    def drain(self) -> None:
        """Run what is in the queue, in order."""
        while not self._queue.empty():
            self._run(self._queue.get())

    def wait(self, seconds: float) -> None:
        """Sleep until something is put, and run it, or until the time is over."""
        try:
            action = self._queue.get(timeout=seconds)
        except queue.Empty:
            return
        self._run(action)

    def close(self) -> None:
        """Refuse new items, and run those that are queued."""
        with self._lock:
            self._closed = True
        self.drain()

    @staticmethod
    def _run(action: Action | None) -> None:
        try:
            if action is not None:
                action()
        except Exception:  # of whoever put it; the others must not suffer from it
            log.exception("an action failed")

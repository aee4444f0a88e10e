"""Run an actor's background tasks; its health check reports one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Own the background tasks of one event loop, until they return or `cancel` ends them."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def start(self, what: str, work: Coroutine[Any, Any, Any]) -> None:
        """Start a task; `what` names it in errors."""
        self._tasks[what] = asyncio.get_running_loop().create_task(work, name=what)

    def check(self) -> None:
        """Raise RuntimeError with the name of a task that failed. Any thread may ask."""
        for what, task in self._tasks.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise RuntimeError(f"{what} failed: {type(error).__name__}: {error}") from error

    def cancel(self) -> None:
        """Cancel the tasks; for the thread of their loop."""
        for task in self._tasks.values():
            task.cancel()

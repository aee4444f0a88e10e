"""Threads that copy, read and write blocks while the engine decodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

Lane = Literal["write", "read"]
"""Reads do not queue behind writes. Within a lane jobs run one after the other, in the order they came."""
Job = Callable[[], None]


class IOThreads(Protocol):
    """Where jobs run. A job raises nothing."""

    def submit(self, lane: Lane, job: Job) -> None: ...

    def close(self) -> None:
        """Finish what was submitted; what comes later is not done."""
        ...


class Threads:
    """A thread for each lane, started with its first job."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, ThreadPoolExecutor] = {}
        self._closed = False

    def submit(self, lane: Lane, job: Job) -> None:
        if self._closed:
            return
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"blocks-{lane}")
        self._lanes[lane].submit(job)

    def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            lane.shutdown()

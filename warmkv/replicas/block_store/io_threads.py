"""Threads that copy, read and write blocks while the engine decodes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

import torch

from warmkv.replicas.current_device import make_current

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
    """Run a thread for each lane, started with its first job, whose current device is the replica's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[Lane, ThreadPoolExecutor] = {}
        self._closed = False

    def submit(self, lane: Lane, job: Job) -> None:
        if self._closed:
            return
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1, f"blocks-{lane}", make_current, (self._device,))
        self._lanes[lane].submit(job)

    def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            lane.shutdown()


class Jobs:
    """Work on I/O threads whose results the engine's thread takes. `wake` tells it, from another thread, of one."""

    def __init__(self, threads: IOThreads, wake: Callable[[], None]) -> None:
        self.threads, self._wake = threads, wake
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, lane: Lane, job: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        """Run a job beside the engine; `finish` gets its result, or its exception, from `settle`."""

        def run() -> None:
            try:
                result = job()
            except Exception as error:
                result = error
            self._done.put(partial(finish, result))
            self._wake()

        self.threads.submit(lane, run)

    def settle(self) -> None:
        """Finish the jobs that are done."""
        while not self._done.empty():
            self._done.get()()

    def close(self) -> None:
        """Finish all that were submitted."""
        self.threads.close()
        self.settle()

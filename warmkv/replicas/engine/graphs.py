"""Record whole decode steps once and replay them, as CUDA graphs: the host launches a step by one call.

A replay reads and writes where the recording did, so a key names all that a recording holds on to: shapes, addresses,
kernels. What a step is told lies in its buffer, which stays where it is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from warmkv.policies.memory_plan import MOST_RECORDED
from warmkv.replicas.engine.faults import is_out_of_memory, is_sticky, let_go

log = logging.getLogger(__name__)
T = TypeVar("T")

SEEN_BEFORE = 16
"""Steps with a key that are computed before one is recorded, which takes as long as some of them."""
TRIED_AGAIN = 1024
"""Steps with a key that are computed before recording, for which memory lacked, is tried again: that takes as long."""


class Recorder(Protocol):
    """Record the calls of a computation on a device."""

    taken: int  # bytes of the device that recordings took so far

    def __call__(self, compute: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Compute once; return the result, and a function that computes it again into the same tensors."""
        ...


class CudaRecorder:
    """Record CUDA graphs, which share their memory: one is replayed at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self.taken = 0

    def __call__(self, compute: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # As `torch.cuda.graph` does first: what that frees would hide what the recording takes.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        # Other threads copy blocks meanwhile. A capture that cannot be ended would leave its stream to this thread.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            result = compute()
        self._pool = graph.pool()
        self.taken += max(0, free - torch.cuda.mem_get_info()[0])  # what other threads take meanwhile included
        graph.replay()  # nothing is computed while it is recorded
        return result, graph.replay


def graphs_on(device: torch.device) -> Graphs[Any] | None:
    """Return recordings on a device, None where nothing records."""
    return Graphs(CudaRecorder()) if device.type == "cuda" else None


@dataclass(slots=True)
class Graphs(Generic[T]):
    """Keep the recordings of an engine's steps."""

    record: Recorder
    seen_before: int = SEEN_BEFORE
    replays: int = 0  # so far
    _seen: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)
    _recorded: OrderedDict[Hashable, tuple[T, Callable[[], None]]] = field(default_factory=OrderedDict)
    _works: bool = True

    @contextmanager
    def recording_soon(self) -> Iterator[None]:
        """Record steps when they are seen a second time meanwhile; the first run allocates their memory."""
        before, self.seen_before = self.seen_before, 1
        try:
            yield
        finally:
            self.seen_before = before

    def compute(self, key: Hashable, compute: Callable[[], T], again: Callable[[], None]) -> T:
        """Compute a step, by a replay if its key is recorded; the next step with this key overwrites the results.

        A step is recorded once its key was seen often enough. If recording fails, `again` resets the step, and it is
        computed; recording is tried again later where memory lacked, else turned off. Raises what computing raises.
        """
        if (held := self._recorded.get(key)) is not None:
            self._recorded.move_to_end(key)
            result, replay = held
            replay()
            self.replays += 1
            return result
        seen = self._seen[key] = self._seen.pop(key, 0) + 1  # to the end, as used last
        _forget(self._seen)
        if not self._works or seen <= self.seen_before:
            return compute()
        try:
            recorded = self._recorded[key] = self.record(compute)
        except Exception as error:
            if is_sticky(error):
                raise
            if is_out_of_memory(error):
                log.warning("memory does not suffice to record a step: it is tried again after %d like it", TRIED_AGAIN)
                self._seen[key] = -TRIED_AGAIN
            else:
                log.exception("steps cannot be recorded here: their calls are launched one by one")
                self._works = False
            let_go(error)
        else:
            _forget(self._recorded)
            return recorded[0]
        again()
        return compute()


def _forget(held: OrderedDict[Hashable, Any]) -> None:
    """Evict the least recently used."""
    while len(held) > MOST_RECORDED:
        held.popitem(last=False)

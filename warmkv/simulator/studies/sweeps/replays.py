"""Replays of the points of a sweep, each no more often than its figures can differ.

Where a replay was never short of room for prefixes, more room changes nothing: nothing is evicted or left out, so at
every moment the same blocks are there. Its figures are those of every point that differs from it by more
`prefix_cache.memory_bytes` alone. Where it was short, one pass does not answer for another capacity, nor for another
TTL: what is found decides how long requests take, and so when others look up, store and evict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.config import Config
from warmkv.faults import UserError
from warmkv.gc_pause import gc_paused
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.summary import figures
from warmkv.simulator.studies.sweeps.figures import Figures
from warmkv.simulator.studies.sweeps.grid import digest
from warmkv.simulator.studies.sweeps.sweep_folder import SweepError
from warmkv.simulator.workload.requests import Requests

if TYPE_CHECKING:
    from warmkv.simulator.studies.sweeps.sweep import SweepTask


class Replays:
    """Replay the same requests, keeping the figures of replays that had room enough, one for all other settings."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._enough: dict[str, tuple[int, Figures]] = {}  # by all other settings: bytes that were never short

    def figures(self, task: SweepTask) -> Figures:
        """Return the figures of a point. Raises SweepError naming the point if it cannot be replayed."""
        key = _but_for_room(task) if _is_shared(task.config) else None
        room = task.config.prefix_cache.memory_limit if key else 0
        if key in self._enough and self._enough[key][0] <= room:
            return self._enough[key][1]
        requests = self._requests
        try:
            with gc_paused():
                turns, inputs = requests.turns, requests.inputs
                done = run(requests.records, task.config, task.variant, task.times, turns=turns, inputs=inputs)
                result, short = done.result, done.outcome.removals.short
                del done  # its jobs
        except UserError as error:
            raise SweepError(f"{task.label}: {error}") from None
        found = figures(result)
        if key is not None and not short:
            self._enough[key] = room, found
        return found


def _is_shared(config: Config) -> bool:
    """Return True if `prefix_cache.memory_bytes` is the room for prefixes and nothing else depends on it."""
    auto = "auto" in (config.prefix_cache.memory_bytes, config.engine.kv_bytes)
    return not (auto or config.has_one_pool or config.cluster.groups)


def _but_for_room(task: SweepTask) -> str:
    """Name all settings but the room for prefixes."""
    settings = task.config.model_dump(mode="json")
    del settings["prefix_cache"]["memory_bytes"]
    return digest(settings, repr(task.variant), repr(task.times))

"""Requests that wait in gateways until a replica has room, as in the live ones (`platform/gateway/sending.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from warmkv.simulator.cluster.replica import Job


class Line:
    """Hold requests that wait, at most `most` in each gateway for the same places: groups of replicas, or single ones.

    Those for the same places are one queue, so that whoever takes the next looks at the first of each alone.
    """

    def __init__(self, most: int) -> None:
        self._most, self._turn, self._count = most, 0, 0
        self._waiting: dict[tuple[int, tuple[str, ...]], int] = {}  # by the gateway and the places
        self._queues: dict[tuple[str, ...], deque[tuple[int, Job]]] = {}

    def __len__(self) -> int:
        return self._count

    def join(self, job: Job, places: Sequence[str]) -> bool:
        """Let a request wait; False if its gateway has as many as may wait for these places."""
        key = (job.gateway, tuple(places))
        waiting = self._waiting.get(key, 0)
        if waiting >= self._most:
            return False
        self._waiting[key] = waiting + 1
        self._count += 1
        self._turn += 1
        self._queues.setdefault(key[1], deque()).append((self._turn, job))
        return True

    def take(self, place: str) -> Job | None:
        """Take out the one that has waited longest for a place; None if there is none."""
        queues = [(queue[0][0], places) for places, queue in self._queues.items() if place in places and queue]
        if not queues:
            return None
        _, places = min(queues)
        _, job = self._queues[places].popleft()
        self._waiting[job.gateway, places] -= 1
        self._count -= 1
        return job

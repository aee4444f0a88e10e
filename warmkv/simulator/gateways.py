"""Gateways of a simulated cluster. Each books what it sends itself, and hears late of what replicas hold and do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from warmkv.config import Config
from warmkv.policies.routing import View, rank
from warmkv.policies.transfer import Fetch, plan
from warmkv.prefixes.index import Depths
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.writers import Writers
from warmkv.simulator.replica import Job

TOLD_SECONDS = 10.0  # for which Ray Serve's routers believe what a replica told of its requests (2.60)

Warm = Callable[[RequestRecord], Mapping[str, Depths]]


class Gateway:
    """One gateway's router and its accounts. `warm` is its index, `alone` whether there is no other gateway."""

    def __init__(self, config: Config, warm: Warm, alone: bool, choice: random.Random) -> None:
        self._config, self._warm, self._alone, self._choice = config, warm, alone, choice
        self._load: dict[str, int] = {}  # requests in flight that it sent
        self._told: dict[str, tuple[float, int]] = {}  # when a replica told of all its requests, and how many
        self._turn = 0
        self.writers = Writers()

    def rank(self, job: Job, replicas: Sequence[str], now: float) -> tuple[Sequence[str], Fetch | None]:
        """Replicas from best to worst for a job, as the live router ranks them, and where others may fetch blocks."""
        if len(replicas) == 1:
            return replicas, None
        hashes = job.record.hashes
        load = self._load if self._alone else self._known_load(now)
        view = View(replicas, hashes, self._warm(job.record), load, self._config.engine.max_slots, self._turn)
        self._turn += 1
        return rank(view, self._config.routing, self._choice), plan(view, self._config.routing)

    def sent(self, replica: str, in_flight: int, now: float) -> None:
        """A replica took a request, and told how many it has, whoever sent them."""
        self._load[replica] = self._load.get(replica, 0) + 1
        self._told[replica] = (now, in_flight)

    def over(self, replica: str) -> None:
        """A request that it sent there has ended."""
        if replica in self._load:
            self._load[replica] -= 1

    def drop(self, replica: str) -> None:
        """Forget a replica that is gone."""
        self._load.pop(replica, None)
        self._told.pop(replica, None)

    def _known_load(self, now: float) -> Mapping[str, int]:
        """The larger of its own and what it was told counts."""
        load = dict(self._load)
        for replica, (at, in_flight) in self._told.items():
            if now - at <= TOLD_SECONDS:
                load[replica] = max(load.get(replica, 0), in_flight)
        return load

"""Gateways of a simulated cluster. Each books what it sends itself, and hears late of what replicas hold and do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from warmkv.config import Config
from warmkv.policies.dispatcher import Dispatcher
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.transfer import Fetch
from warmkv.prefixes.index import Depths
from warmkv.prefixes.writers import Writers
from warmkv.simulator.cluster.replica import Job

Warm = Callable[[Job, float], dict[str, Depths]]


class SimulatedGateway:
    """One gateway's router and its accounts. `warm` is its index, `alone` whether there is no other gateway.

    Simulated replicas die, but never keep failing: the router's breaker stays closed.
    """

    def __init__(self, config: Config, warm: Warm, alone: bool, random: Random, clock: Callable[[], float]) -> None:
        late = config.simulator.index_delay > 0
        self._dispatcher = Dispatcher(config.routing, config.engine.max_slots, random, clock, late=late)
        self.in_flight, self._slots = self._dispatcher.in_flight, config.engine.max_slots
        self._warm, self._alone, self._one_kind = warm, alone, not config.cluster.groups
        self._lifetimes = Lifetimes.of(config.prefix_cache) if config.prefix_cache.enabled else None
        self.writers = Writers()
        self._by_session = config.routing.policy == "sticky_session"

    def opened(self, replica: str, slots: int) -> None:
        """Learn of a replica, and how many sequences it decodes together."""
        if slots != self._slots:
            self._dispatcher.slots_of[replica] = slots

    def choose(
        self, job: Job, replicas: Sequence[str], now: float, *, moves: bool = True, whole: bool = True
    ) -> tuple[Sequence[str], Fetch | None]:
        """Rank the replicas, at least one, for a job, and choose where the others may fetch blocks.

        `moves` says that each of them can fetch blocks from any other, `whole` that there are no others.
        """
        if len(replicas) == 1 and self._one_kind:
            return replicas, None
        hashes: Sequence[Any] = job.keys  # stand for the hashes, but where a session is named by one
        if self._by_session:
            hashes = job.records.keys_of(*job.records.hashes.of(job.number))
        leaves = 0
        if self._lifetimes is not None:
            leaves = self._lifetimes.stored_blocks(job.marks, len(hashes), job.block_size)
        choice = self._dispatcher.choose(
            job.number,
            hashes,
            replicas,
            warm=self._warm(job, now),
            leaves=leaves,
            session=job.records.name("session", job.number).encode(),
            moves=moves,
            whole=whole,
        )
        return choice.order, choice.fetch

    def sent(self, job: Job, replica: str, ongoing: int) -> None:
        """Record that a replica took a job, and how many it tells that it has now."""
        self.in_flight.book(job.number, replica)
        if not self._alone:
            self.in_flight.told(replica, ongoing)

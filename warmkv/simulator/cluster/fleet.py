"""The replicas of a simulated cluster: they start, fail, are stopped and replaced, as many as are wanted."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import simpy

from warmkv.config import Config, FailureConfig
from warmkv.policies.transfer import TransferTerms
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import ReplicaCache
from warmkv.simulator.cluster.autoscaler import REPORT_SECONDS, Autoscaler
from warmkv.simulator.cluster.replica import Job, SimulatedReplica
from warmkv.simulator.cluster.stores import Stores
from warmkv.simulator.cluster.transfers import Moved, Process, SimulatedTransfers, hand_over


class Fleet:
    """Start and end replicas of one kind, in SimPy's time, until `close`.

    They have places, numbered from 0: one that starts takes the lowest that is free. Those that follow the first in a
    place have names of their own, as in Ray Serve. All names begin with `name`.

    `ready` is told the name of a replica that takes requests, `gone` of one that is there no more, `lost` the requests
    that it had.
    """

    def __init__(
        self,
        env: simpy.Environment,
        config: Config,
        stores: Stores,
        new: Callable[[str, ReplicaCache], SimulatedReplica],
        ready: Callable[[str], None],
        gone: Callable[[str], None],
        lost: Callable[[Sequence[Job]], None],
        moved: Moved,
        name: str = "replica",
    ) -> None:
        self._env, self._config, self._stores, self._new, self._name = env, config, stores, new, name
        self._on_ready, self._on_gone, self._on_lost = ready, gone, lost
        self._wanted, self._terms = config.cluster.replicas, TransferTerms.of(config)
        scaling = config.cluster.autoscaling
        self._autoscaler = Autoscaler(scaling, self._wanted) if scaling is not None else None
        self._open = True
        self.alive, self.moved = TimeWeightedGauge(), moved
        self.serving: dict[str, SimulatedReplica] = {}  # those that take requests
        self.names: list[str] = []  # theirs
        self.caches: list[ReplicaCache] = []  # likewise
        self.transfers: dict[str, SimulatedTransfers] = {}  # of all that are there
        self._starting: dict[str, SimulatedReplica] = {}
        self._draining: dict[str, SimulatedReplica] = {}  # go when the requests that they have are over
        self._leaving = set[str]()  # have begun to hand their blocks over
        self._places: dict[int, str] = {}  # the names of all that are there or not known to be lost
        self._generations: Counter[int] = Counter()  # replicas that each place has had

    def open(self) -> None:
        """Start the first replicas, which take requests at once, and schedule failures and reports."""
        for _ in range(self._wanted):
            self._ready(self._start())
        for failure in self._config.simulator.failures:
            self._after(failure.at, partial(self._fail, failure))
        if self._autoscaler is not None:
            self._after(REPORT_SECONDS, self._report)

    def open_named(self, names: Sequence[str]) -> None:
        """Open replicas of these names, which neither fail nor change in number."""
        for place, name in enumerate(names):
            self._ready(self._add(place, name))

    def close(self) -> None:
        """Close, since there are no more requests: what was to happen yet does not."""
        self._open = False
        for transfers in self.transfers.values():
            transfers.close()

    def count(self, change: int) -> None:
        """Count requests that replicas took, or that ended."""
        if self._autoscaler is not None:
            self._autoscaler.changed(change, self._env.now)

    def ended(self, name: str) -> None:
        """Record the end of a replica's request."""
        replica = self._draining.get(name)
        if replica is not None and not replica.ongoing and name not in self._leaving:
            self._leave(replica)

    # --- one comes

    def _start(self) -> SimulatedReplica:
        place = next(number for number in itertools.count() if number not in self._places)
        generation = self._generations[place]
        self._generations[place] += 1
        name = f"{self._name}-{place}"
        return self._add(place, f"{name}.{generation}" if generation else name)

    def _add(self, place: int, name: str) -> SimulatedReplica:
        replica = self._starting[name] = self._new(name, self._stores.new(name))
        self.transfers[name] = SimulatedTransfers(
            self._env, replica, self._terms, self._stores.block_bytes, self._donor, self.moved
        )
        self._places[place] = name
        self.alive.change(1, self._env.now)
        return replica

    def _ready(self, replica: SimulatedReplica) -> None:
        if self._starting.pop(replica.name, None) is not None:
            self.serving[replica.name] = replica
            self._changed()
            self._on_ready(replica.name)

    def _donor(self, name: str) -> SimulatedReplica | None:
        return self.serving.get(name) or self._draining.get(name)

    # --- one goes

    def _fail(self, failure: FailureConfig) -> None:
        """Kill the replica in a place; the loss is known after a while."""
        name = self._places.get(failure.replica, "")
        replica = self.serving.get(name) or self._starting.get(name) or self._draining.get(name)
        if replica is None or not self._open:
            return
        wanted = name not in self._draining
        self._kill(replica)
        if wanted:
            self._places[failure.replica] = name
            self._after(failure.seconds, partial(self._noticed, failure.replica))

    def _noticed(self, place: int) -> None:
        del self._places[place]
        self._resize()

    def _kill(self, replica: SimulatedReplica) -> None:
        """Kill a replica with all it holds; its requests are resent."""
        lost = [*replica.fail(), *self.transfers[replica.name].close()]
        self._gone(replica)
        self._on_lost(lost)

    def _gone(self, replica: SimulatedReplica) -> None:
        now = self._env.now
        self._stores.drop(replica.name, replica.cache, now)
        self.alive.change(-1, now)
        for some in (self.serving, self._starting, self._draining, self.transfers):
            some.pop(replica.name, None)
        self._places = {place: name for place, name in self._places.items() if name != replica.name}
        self._changed()
        self._on_gone(replica.name)

    def _changed(self) -> None:
        self.names = list(self.serving)
        self.caches = [replica.cache for replica in self.serving.values()]

    # --- as many as are wanted

    def _resize(self) -> None:
        """Start as many as are missing, or stop as many as are too many."""
        if not self._open:
            return
        missing = self._wanted - (len(self._places) - len(self._draining))
        for _ in range(missing):
            self._after(self._config.simulator.startup_seconds, partial(self._ready, self._start()))
        newest = [*reversed(self._starting.values()), *reversed(self.serving.values())]  # first, as in Ray Serve
        for replica in newest[: max(0, -missing)]:
            self._stop(replica)

    def _stop(self, replica: SimulatedReplica) -> None:
        """Drain a replica: it takes no more requests and stops when its own have ended or had their time."""
        if self._starting.get(replica.name) is not None:
            self._gone(replica)
            return
        del self.serving[replica.name]
        self._changed()
        self._draining[replica.name] = replica
        if replica.ongoing:
            self._after(self._config.cluster.drain_seconds, partial(self._hurry, replica))
        else:
            self._leave(replica)

    def _hurry(self, replica: SimulatedReplica) -> None:
        """Let a replica go whose requests have had their time."""
        if replica.name in self._draining and replica.ongoing and self._open:
            self._leave(replica)

    def _leave(self, replica: SimulatedReplica) -> None:
        """Leave the hottest blocks to the others, then go: requests that have not ended by then are resumed there."""
        self._leaving.add(replica.name)
        if self._terms.handover_seconds and self.serving:
            self._env.process(self._hand_over(replica))
        else:
            self._kill(replica)

    def _hand_over(self, replica: SimulatedReplica) -> Process:
        def there() -> bool:
            return self._open and replica.name in self._draining

        def peer(name: str) -> ReplicaCache | None:
            return self.serving[name].cache if name in self.serving else None

        names = sorted(self.serving)
        yield from hand_over(
            self._env, replica.cache, names, peer, self._stores.holders, self._terms, self.moved, there
        )
        if there():
            self._kill(replica)

    # --- autoscaling

    def _report(self) -> None:
        """Report the requests that replicas have to the autoscaler."""
        if self._autoscaler is not None and self._open:
            self._wanted = self._autoscaler.report(self._env.now)
            self._resize()
            if (wait := self._autoscaler.due - self._env.now) < REPORT_SECONDS:
                self._after(wait, self._decide)
            self._after(REPORT_SECONDS, self._report)

    def _decide(self) -> None:
        if self._autoscaler is not None:
            self._wanted = self._autoscaler.decide(self._env.now)
            self._resize()

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: action())

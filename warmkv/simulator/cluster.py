"""A simulated cluster: requests arrive, are routed by prefix and load, and run on replicas that share nothing."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import simpy

from warmkv.config import Config, FailureConfig
from warmkv.policies.costs import StepTimes
from warmkv.policies.eviction import lru
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import Tier, tiers_of
from warmkv.prefixes.index import Depths, PrefixIndex
from warmkv.simulator.autoscaler import REPORT_SECONDS, Autoscaler
from warmkv.simulator.cache import Removals, ReplicaCache
from warmkv.simulator.gateways import Gateway
from warmkv.simulator.late_index import LateIndex
from warmkv.simulator.measures import Level
from warmkv.simulator.replica import NEVER, Job, Replica
from warmkv.simulator.runs import Layout, RunCache, layout

Progress = Callable[[int], None]  # told how many requests have arrived
PROGRESS_EVERY = 500
NO_TIERS = [Tier("device", 0)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cluster held over time; what became of each request stands in the jobs."""

    slots: Level  # bytes of decode slots, all replicas together
    stored: Level  # bytes of stored blocks and tails, all replicas and tiers together
    tiers: Mapping[str, Level]  # the same, tier by tier
    removals: Removals
    alive: Level  # replicas, those that start included
    end: float  # virtual seconds from the first arrival to the last end


def kv_shape(config: Config) -> KVShape:
    """The configured size of the model's KV cache."""
    simulator = config.simulator
    return KVShape(simulator.layers, simulator.kv_heads, simulator.head_dim, simulator.dtype_bytes)


def gpus_per_replica(config: Config) -> float:
    """A replica without a GPU stands for one that has one."""
    return config.cluster.gpus_per_replica or 1.0


def simulate(
    jobs: Sequence[Job],
    config: Config,
    lifetimes: Lifetimes,
    token_bytes: int,
    times: StepTimes,
    *,
    fast_forward: bool = True,
    by_runs: bool = True,
    as_placed: bool = False,
    seed: int = 0,
    progress: Progress = lambda arrived: None,
) -> Outcome:
    """Run jobs, ordered by arrival, to their end; their outcome is written into them.

    A job that waits for another arrives its think time after that one ended, or was refused.

    A request that fits no replica, or finds every queue full, is refused: it gets no replica. `seed` feeds the routing,
    of which only power_of_two draws at random. `fast_forward=False` steps token by token, and `by_runs=False`
    follows every block by itself where runs of blocks would do; both are slower, with equal results. `as_placed` sends
    every request to the replica that its record names: those are the cluster from beginning to end.
    """
    return Cluster(jobs, config, lifetimes, token_bytes, times, fast_forward, by_runs, as_placed, seed, progress).run()


class Cluster:
    """Replicas that come and go, and the gateways before them, in SimPy's time.

    Replicas have places, numbered from 0: one that starts takes the lowest that is free. Those that follow the first in
    a place have names of their own, as in Ray Serve.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        config: Config,
        lifetimes: Lifetimes,
        token_bytes: int,
        times: StepTimes,
        fast_forward: bool,
        by_runs: bool,
        as_placed: bool,
        seed: int,
        progress: Progress,
    ) -> None:
        self._jobs, self._config, self._lifetimes, self._token_bytes = jobs, config, lifetimes, token_bytes
        self._times, self._fast_forward, self._progress = times, fast_forward, progress
        self._env = simpy.Environment()
        self._tiers = tiers_of(config.prefix_cache, kv_shape(config)) if config.prefix_cache.enabled else NO_TIERS
        self._slots, self._stored, self._alive = Level(), Level(), Level()
        self._by_tier = {tier.name: Level() for tier in self._tiers}
        self._removals = Removals()

        delay = config.simulator.index_delay
        self._index = PrefixIndex()
        self._late = LateIndex(config.directory.publish_seconds, delay) if delay else None
        self._layout = runs_of(jobs, config, self._tiers, lifetimes) if by_runs and not delay else None

        count = config.cluster.gateways
        self._gateways = [
            Gateway(config, self._warm, count == 1, random.Random(seed + number)) for number in range(count)
        ]
        self._unplaced: deque[Job] = deque()  # requests while no replica takes any
        self._arrived = 0
        self._left = len(jobs)  # jobs that have not ended

        self._placed = sorted({job.record.replica for job in jobs}) if as_placed else []
        self._wanted = len(self._placed) or config.cluster.replicas
        scaling = None if as_placed else config.cluster.autoscaling
        self._autoscaler = Autoscaler(scaling, self._wanted) if scaling is not None else None
        self._replicas: dict[str, Replica] = {}  # those that take requests
        self._names: list[str] = []  # theirs
        self._caches: list[ReplicaCache | RunCache] = []  # likewise
        self._starting: dict[str, Replica] = {}
        self._draining: dict[str, Replica] = {}  # take no more requests, and go when those that they have are over
        self._run_caches: dict[str, RunCache] = {}
        self._places: dict[int, str] = {}  # the names of all that are there or not known to be lost
        self._generations: Counter[int] = Counter()  # replicas that each place has had

    def run(self) -> Outcome:
        """Until all jobs have ended."""
        for _ in range(self._wanted):
            self._ready(self._start())
        for failure in () if self._placed else self._config.simulator.failures:
            self._after(failure.at, partial(self._fail, failure))
        if self._autoscaler is not None:
            self._after(REPORT_SECONDS, self._report)
        first = [job for job in self._jobs if not job.waits]
        self._env.process(_arrivals(self._env, first, self._arrive))
        self._env.run()
        end = max((job.finished for job in self._jobs), default=0.0)
        for replica in self._replicas.values():
            replica.cache.expire(end)
        self._progress(len(self._jobs))
        return Outcome(self._slots, self._stored, self._by_tier, self._removals, self._alive, max(0.0, end))

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: action())

    # --- requests

    def _arrive(self, job: Job) -> None:
        if self._arrived % PROGRESS_EVERY == 0:
            self._progress(self._arrived)
        job.gateway = self._arrived % len(self._gateways)
        self._arrived += 1
        if self._autoscaler is not None:
            self._autoscaler.changed(1, self._env.now)
        if job.shares:
            self._gateways[job.gateway].writers.arrived(str(job.number), self._env.now)
        self._send(job)

    def _send(self, job: Job) -> None:
        """Hand a job to the best replica that can take it. It waits while there is none; if none can, it is refused."""
        now, gateway = self._env.now, self._gateways[job.gateway]
        if not self._replicas and len(self._unplaced) < self._config.cluster.max_queued_requests * len(self._gateways):
            self._unplaced.append(job)
            return
        for cache in self._caches:
            if cache.due <= now:
                cache.expire(now)
        ranked = (job.record.replica,) if self._placed else gateway.rank(job, self._names, now)
        for name in ranked:
            replica = self._replicas[name]
            if not replica.full and replica.ever_fits(job):
                replica.submit(job)
                gateway.sent(name, replica.in_flight, now)
                return
        job.replica, job.started, job.first, job.finished = "", NEVER, NEVER, NEVER
        self._over(job)

    def _began(self, job: Job) -> None:
        """Whoever needed a prefix before it was there is a writer, too."""
        if job.shares:
            record, writers = job.record, self._gateways[job.gateway].writers
            found = job.match.hit
            now = self._env.now
            job.read = writers.began(str(job.number), job.replica, record.reads, job.marks, found, job.written, now)

    def _ended(self, job: Job) -> None:
        self._gateways[job.gateway].over(job.replica)
        self._over(job)
        if (replica := self._draining.get(job.replica)) is not None and not replica.in_flight:
            self._gone(replica)

    def _over(self, job: Job) -> None:
        self._left -= 1
        if self._autoscaler is not None:
            self._autoscaler.changed(-1, self._env.now)
        if job.shares:
            self._gateways[job.gateway].writers.left(str(job.number))
        following = job.following
        if following is not None:
            wait = self._times.overhead + following.think
            following.arrival = self._env.now + wait
            self._after(wait, partial(self._arrive, following))

    def _warm(self, hashes: tuple[bytes, ...]) -> Mapping[str, Depths]:
        if self._layout is not None:
            runs = self._layout.runs[hashes]
            return {name: blocks.depths(runs) for name, blocks in self._run_caches.items()}
        index = self._index if self._late is None else self._late.at(self._env.now)
        return index.longest_match(hashes)

    # --- replicas

    def _start(self) -> Replica:
        """A new replica, in the lowest free place."""
        place = next(number for number in itertools.count() if number not in self._places)
        generation = self._generations[place]
        self._generations[place] += 1
        name = self._placed[place] if self._placed else f"replica-{place}"
        if generation:
            name += f".{generation}"
        replica = Replica(
            self._env, name, self._config.engine, self._times, self._cache(name), self._slots, self._fast_forward,
            self._ended, self._began,
        )  # fmt: skip
        self._places[place] = name
        self._starting[name] = replica
        self._alive.change(1, self._env.now)
        return replica

    def _cache(self, name: str) -> ReplicaCache | RunCache:
        levels = tuple(self._by_tier.values())
        if self._layout is None:
            share = self._config.prefix_cache.tenant_share
            return ReplicaCache(
                name, self._tiers, self._token_bytes, self._lifetimes, self._index, self._stored, self._removals, share,
                levels, self._late,
            )  # fmt: skip
        size = self._jobs[0].record.block_size
        weights = [tier.weigh(size * self._token_bytes, size) for tier in self._tiers]
        rooms = [(tier.capacity // weight, weight) for tier, weight in zip(self._tiers, weights, strict=True)]
        tiers, ttl = list(self._by_tier), self._lifetimes.default
        cache = RunCache(self._layout, tiers, rooms, ttl, self._stored, levels, self._removals)
        self._run_caches[name] = cache
        return cache

    def _ready(self, replica: Replica) -> None:
        """It takes requests from now on, and first those that no replica was there for."""
        if self._starting.pop(replica.name, None) is None:
            return
        self._replicas[replica.name] = replica
        self._names = list(self._replicas)
        self._caches = [replica.cache for replica in self._replicas.values()]
        waiting, self._unplaced = self._unplaced, deque()
        for job in waiting:
            self._send(job)

    def _fail(self, failure: FailureConfig) -> None:
        """A replica dies with all it holds; its requests go elsewhere, and after a while another takes its place."""
        name = self._places.get(failure.replica)
        replica = next((some[name] for some in (self._replicas, self._starting, self._draining) if name in some), None)
        if replica is None or name is None or not self._left:
            return
        wanted = name not in self._draining
        lost = replica.fail()
        self._gone(replica)
        if wanted:
            self._places[failure.replica] = name  # until it is known that it is lost
            self._after(failure.seconds, partial(self._noticed, failure.replica))
        self._send_again(lost)

    def _send_again(self, lost: Sequence[Job]) -> None:
        """Requests whose replica is gone go elsewhere."""
        for job in sorted(lost, key=lambda job: job.number):
            if job.first == NEVER:
                job.retries += 1
            else:
                job.resumptions += 1
            self._send(job)

    def _gone(self, replica: Replica) -> None:
        """A replica is there no more, nor what it held."""
        now = self._env.now
        replica.cache.expire(now)
        replica.cache.drop(now)
        self._alive.change(-1, now)
        for some in (self._replicas, self._starting, self._draining):
            some.pop(replica.name, None)
        self._places = {place: name for place, name in self._places.items() if name != replica.name}
        self._run_caches.pop(replica.name, None)
        self._names = list(self._replicas)
        self._caches = [replica.cache for replica in self._replicas.values()]
        if self._late is not None:
            self._late.drop_replica(replica.name)
        for gateway in self._gateways:
            gateway.drop(replica.name)

    def _noticed(self, place: int) -> None:
        """That the replica in a place is lost is known."""
        del self._places[place]
        self._resize()

    def _resize(self) -> None:
        """Start as many replicas as are missing, or stop as many as are too many."""
        if not self._left:
            return
        missing = self._wanted - (len(self._places) - len(self._draining))
        for _ in range(missing):
            self._after(self._config.simulator.startup_seconds, partial(self._ready, self._start()))
        newest = [*reversed(self._starting.values()), *reversed(self._replicas.values())]  # first, as in Ray Serve
        for replica in newest[: max(0, -missing)]:
            self._stop(replica)

    def _stop(self, replica: Replica) -> None:
        """A replica takes no more requests and goes when those that it has are over, or after a while."""
        if not replica.in_flight:
            self._gone(replica)
            return
        del self._replicas[replica.name]
        self._names = list(self._replicas)
        self._draining[replica.name] = replica
        self._after(self._config.cluster.drain_seconds, partial(self._kill, replica))

    def _kill(self, replica: Replica) -> None:
        if replica.name in self._draining:
            lost = replica.fail()
            self._gone(replica)
            self._send_again(lost)

    # --- autoscaling

    def _report(self) -> None:
        """The gateways tell how many requests are in flight."""
        if self._autoscaler is not None and self._left:
            self._wanted = self._autoscaler.report(self._env.now)
            self._resize()
            if (wait := self._autoscaler.due - self._env.now) < REPORT_SECONDS:
                self._after(wait, self._decide)
            self._after(REPORT_SECONDS, self._report)

    def _decide(self) -> None:
        if self._autoscaler is not None:
            self._wanted = self._autoscaler.decide(self._env.now)
            self._resize()


def runs_of(jobs: Sequence[Job], config: Config, tiers: Sequence[Tier], lifetimes: Lifetimes) -> Layout | None:
    """The blocks of all prompts as runs, if a `RunCache` does with them what the ledgers do."""
    settings = config.prefix_cache
    plain = all(tier.order is lru for tier in tiers) and not settings.tenant_share and lifetimes.automatic
    if not plain or len({job.record.block_size for job in jobs}) != 1:
        return None
    if any(job.marks or job.record.reads or job.sum_bytes for job in jobs):
        return None
    return layout(job.record.hashes for job in jobs)


def _arrivals(
    env: simpy.Environment, jobs: Sequence[Job], arrive: Callable[[Job], None]
) -> Generator[simpy.Event, None, None]:
    for job in jobs:
        if job.arrival > env.now:
            yield env.timeout(job.arrival - env.now)
        arrive(job)

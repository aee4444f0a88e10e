"""A simulated cluster: requests arrive, are routed by prefix and load, and run on replicas that share nothing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from warmkv.config import Config
from warmkv.policies.breaker import retry_pause
from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.tiers import weight
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import Removals, ReplicaCache
from warmkv.simulator.cluster.clock import FIRST, Alarm, Clock
from warmkv.simulator.cluster.fleet import Fleet
from warmkv.simulator.cluster.gateways import SimulatedGateway
from warmkv.simulator.cluster.memory import pool_bytes, resolved
from warmkv.simulator.cluster.replica import NEVER, WHOLE_CACHE, Job, SimulatedReplica
from warmkv.simulator.cluster.stores import LayOut, Stores
from warmkv.simulator.cluster.transfers import Moved
from warmkv.simulator.engine.kv_blocks import BLOCK
from warmkv.simulator.engine.mixed import BatchingError, Limits
from warmkv.simulator.steps.costs import StepKind, StepTimes

Progress = Callable[[int], None]  # told how many requests have arrived
PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cluster held over time; what became of each request stands in the jobs."""

    slots: TimeWeightedGauge  # bytes of decode slots, all replicas together
    stored: TimeWeightedGauge  # bytes of stored blocks and tails, all replicas and tiers together
    tiers: Mapping[str, TimeWeightedGauge]  # the same, tier by tier
    removals: Removals
    alive: TimeWeightedGauge  # replicas, those that start included
    moved: Moved  # between replicas
    end: float  # virtual seconds from the first arrival to the last end


def simulate(
    jobs: Sequence[Job],
    config: Config,
    lifetimes: Lifetimes,
    token_bytes: int,
    times: StepTimes,
    *,
    fast_forward: bool = True,
    as_placed: bool = False,
    seed: int = 0,
    lay_out: LayOut | None = None,
    held: Sequence[Contents] = (),
    begun: float = 0.0,
    progress: Progress = lambda arrived: None,
) -> Outcome:
    """Run jobs, ordered by arrival, to their end; their outcome is written into them.

    A job that waits for another arrives its think time after that one ended, or was refused.

    A request that fits no replica, or finds every queue full, is refused: it gets no replica. `seed` feeds the routing,
    of which only power_of_two draws at random. `fast_forward=False` steps token by token, with equal results.
    `as_placed` sends every request to the replica that its record names: those are the cluster from beginning to end.
    `lay_out` gives the blocks of the prompts, and of more prompts, as runs, where whoever calls keeps them.

    The first replicas begin with what is `held`, one after the other, the others empty; the clock starts at the Unix
    time `begun`.

    Raises BatchingError if a request could not be batched as `simulator.batching: mixed` does.
    """
    config = resolved(config)
    if not config.engine.capabilities(config.prefix_cache.storage).moves_blocks:
        config = config.model_copy(update={"routing": config.routing.model_copy(update={"transfer": False})})
    mixed = mixed_limits(jobs, config, token_bytes) if config.batches_as_vllm else None
    stores = Stores(jobs, config, lifetimes, token_bytes, lay_out, held)
    return Cluster(jobs, config, stores, times, fast_forward, as_placed, seed, progress, mixed).run(held, begun)


def mixed_limits(jobs: Sequence[Job], config: Config, token_bytes: int) -> Limits:
    """Return the limits of replicas that batch as vLLM does. Raises BatchingError for what vLLM does not do."""
    engine, kind = config.engine, StepKind.of(config.whole_cache)
    for job in jobs:
        if job.kind not in (kind, WHOLE_CACHE):
            raise BatchingError(
                f"simulator.batching=mixed keeps the whole cache, as vLLM does, but request {job.record.id} has "
                f"{job.kind.label}; choose the policy {kind.label}"
            )
    block = config.kv_block or BLOCK
    if config.has_one_pool and config.prefix_cache.enabled and jobs:
        block = jobs[0].block_size  # by which prefixes are found
    room = pool_bytes(config) if config.has_one_pool else engine.kv_limit
    tokens = room // weight(kind.storage, kv_shape(config))(token_bytes, 1)
    if config.has_one_pool:
        tokens -= block  # which vLLM sets aside
    return Limits(engine.max_slots, engine.tokens_per_step(on_gpu=False), tokens, block)


class Cluster:
    """Requests on their way through the gateways to the replicas, in SimPy's time."""

    def __init__(
        self,
        jobs: Sequence[Job],
        config: Config,
        stores: Stores,
        times: StepTimes,
        fast_forward: bool,
        as_placed: bool,
        seed: int,
        progress: Progress,
        mixed: Limits | None = None,
    ) -> None:
        self._mixed = mixed
        self._jobs, self._config, self._stores, self._times = jobs, config, stores, times
        self._fast_forward, self._as_placed, self._progress = fast_forward, as_placed, progress
        self._env, self._slots = Clock(), TimeWeightedGauge()
        count = config.cluster.gateways
        self._gateways = [
            SimulatedGateway(config, stores.warm, count == 1, random.Random(seed + number), lambda: self._env.now)
            for number in range(count)
        ]
        self._fleet = Fleet(self._env, config, stores, self._replica, self._ready, self._gone, self._lost)
        self._unplaced: deque[Job] = deque()  # requests while no replica takes any
        self._arrived = 0
        self._left = len(jobs)  # jobs that have not ended

    def run(self, held: Sequence[Contents] = (), begun: float = 0.0) -> Outcome:
        """Run until all jobs have ended. What is `held` is there when the clock starts, at the Unix time `begun`."""
        if self._as_placed:
            self._fleet.open_named(sorted(set(self._jobs[0].records.values("replica")) if self._jobs else ()))
        else:
            self._fleet.open()
        for replica, contents in zip(self._fleet.serving.values(), held, strict=False):
            replica.restore(contents, begun)
        if not self._jobs:
            self._fleet.close()
        first = [job for job in self._jobs if not job.waits]
        _arrivals(self._env, first, self._arrive)
        self._env.run()
        end = max(0.0, max((job.finished for job in self._jobs), default=0.0))
        for cache in self._fleet.caches:
            cache.expire(end)
        self._progress(len(self._jobs))
        stores, fleet = self._stores, self._fleet
        return Outcome(self._slots, stores.stored, stores.by_tier, stores.removals, fleet.alive, fleet.moved, end)

    # --- a request comes and goes

    def _arrive(self, job: Job) -> None:
        if self._arrived % PROGRESS_EVERY == 0:
            self._progress(self._arrived)
        job.gateway = self._arrived % len(self._gateways)
        self._arrived += 1
        self._fleet.in_flight(1)
        if job.shares:
            self._gateways[job.gateway].writers.arrived(job.number, self._env.now)
        self._send(job)

    def _send(self, job: Job) -> None:
        """Hand a job to the best replica that can take it. It waits while there is none; if none can, it is refused."""
        now, gateway, fleet = self._env.now, self._gateways[job.gateway], self._fleet
        if not fleet.serving:
            if len(self._unplaced) < self._config.cluster.max_queued_requests * len(self._gateways):
                self._unplaced.append(job)
            else:
                self._refuse(job)
            return
        for cache in fleet.caches:
            if cache.deadlines.due <= now:
                cache.expire(now)
        order, fetch = gateway.choose(job, fleet.names, now)
        if self._as_placed:
            order = (job.records.name("replica", job.number),)
        for name in order:
            replica = fleet.serving[name]
            if not replica.full and replica.ever_fits(job):
                fleet.transfers[name].take(job, fetch)
                gateway.sent(job, name, replica.in_flight, now)
                return
        self._refuse(job)

    def _refuse(self, job: Job) -> None:
        job.replica, job.started, job.first, job.finished = "", NEVER, NEVER, NEVER
        self._over(job)

    def _began(self, job: Job) -> None:
        """Bill a computed prompt: a request that came before a prefix was stored is billed as writing it, too."""
        gateway = self._gateways[job.gateway]
        gateway.in_flight.began(job.number)
        if job.resumptions:
            return
        self._fleet.transfers[job.replica].computed(job)
        if job.shares:
            reads, found, now = job.records.reads_of(job.number), job.match.hit, self._env.now
            job.read = gateway.writers.began(job.number, job.replica, reads, job.marks, found, job.written, now)

    def _ended(self, job: Job) -> None:
        self._over(job)
        self._fleet.ended(job.replica)

    def _over(self, job: Job) -> None:
        gateway = self._gateways[job.gateway]
        gateway.in_flight.release(job.number)
        self._fleet.in_flight(-1)
        if job.shares:
            gateway.writers.left(job.number)
        job.known_hashes = None
        following = job.following
        if following is not None:
            wait = self._times.overhead + following.think
            following.arrival = self._env.now + wait
            self._env.timeout(wait).callbacks.append(lambda _: self._arrive(following))
        self._left -= 1
        if not self._left:
            self._fleet.close()

    # --- replicas come and go

    def _replica(self, name: str, cache: ReplicaCache) -> SimulatedReplica:
        engine, times, fast = self._config.engine, self._times, self._fast_forward
        reading = self._stores.tier_seconds
        return SimulatedReplica(
            self._env, name, engine, times, cache, self._slots, fast, self._ended, self._began, reading, self._mixed,
            self._config.prefix_cache.enabled, StepKind.of(self._config.whole_cache), self._config.has_one_pool,
        )  # fmt: skip

    def _ready(self) -> None:
        waiting, self._unplaced = self._unplaced, deque()
        for job in waiting:
            self._send(job)

    def _gone(self, name: str) -> None:
        for gateway in self._gateways:
            gateway.drop(name)

    def _lost(self, jobs: Sequence[Job]) -> None:
        """Resend the requests of a lost replica, as often and as soon as the gateway does."""
        gateway = self._config.gateway
        for job in sorted(jobs, key=lambda job: job.number):
            begun = job.first != NEVER
            attempts = 1 + job.retries + job.resumptions
            if attempts > gateway.retries:
                job.failed = True
                self._refuse(job)
                continue
            job.retries += not begun
            job.resumptions += begun
            if attempts == 1:
                self._send(job)
            else:
                again = self._env.timeout(retry_pause(attempts))
                again.callbacks.append(lambda _, job=job: self._send(job))


def _arrivals(clock: Clock, jobs: Sequence[Job], arrive: Callable[[Job], None]) -> None:
    """Let jobs arrive, each at its time: those of now at once, then each by an alarm that is set when it is next."""
    coming = iter(jobs)
    job = next(coming, None)

    def go_on(now: float) -> None:
        nonlocal job
        while job is not None:
            if job.arrival > now:
                clock.set(alarm, job.arrival, FIRST)
                return
            arrive(job)
            job = next(coming, None)

    alarm = Alarm(go_on)
    go_on(clock.now)

"""A simulated cluster: requests arrive, are routed by prefix and load, and run on replicas that share nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import simpy

from warmkv.config import Config
from warmkv.policies.costs import StepTimes
from warmkv.policies.eviction import lru
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.routing import View, rank
from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import Tier, tiers_of
from warmkv.prefixes.index import Depths, PrefixIndex
from warmkv.simulator.cache import Removals, ReplicaCache
from warmkv.simulator.measures import Level
from warmkv.simulator.replica import Job, Replica
from warmkv.simulator.runs import Layout, RunCache, layout

Progress = Callable[[int], None]  # told how many requests have arrived
PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cluster held over time; what became of each request stands in the jobs."""

    slots: Level  # bytes of decode slots, all replicas together
    stored: Level  # bytes of stored blocks and tails, all replicas and tiers together
    tiers: Mapping[str, Level]  # the same, tier by tier
    removals: Removals
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
    every request to the replica that its record names, and takes those replicas for the cluster.
    """
    env = simpy.Environment()
    index, slots, stored, removals = PrefixIndex(), Level(), Level(), Removals()
    tiers = tiers_of(config.prefix_cache, kv_shape(config)) if config.prefix_cache.enabled else [Tier("device", 0)]
    by_tier = {tier.name: Level() for tier in tiers}
    found = runs_of(jobs, config, tiers, lifetimes) if by_runs else None
    replicas: dict[str, Replica] = {}
    arrived = 0

    def arrive(job: Job) -> None:
        nonlocal arrived
        if arrived % PROGRESS_EVERY == 0:
            progress(arrived)
        arrived += 1
        for replica in replicas.values():
            replica.cache.expire(env.now)
        for name in choose(job):
            replica = replicas[name]
            if not replica.full and replica.ever_fits(job):
                replica.submit(job)
                return
        ended(job)

    def ended(job: Job) -> None:
        following = job.following
        if following is not None:
            wait = times.overhead + following.think
            following.arrival = env.now + wait
            env.timeout(wait).callbacks.append(lambda _: arrive(following))

    run_caches: dict[str, RunCache] = {}
    levels = tuple(by_tier.values())
    names = [f"replica-{number}" for number in range(config.cluster.replicas)]
    if as_placed:
        names = sorted({job.record.replica for job in jobs})
    for name in names:
        cache: ReplicaCache | RunCache
        if found is None:
            share = config.prefix_cache.tenant_share
            cache = ReplicaCache(name, tiers, token_bytes, lifetimes, index, stored, removals, share, levels)
        else:
            size = jobs[0].record.block_size
            weights = [tier.weigh(size * token_bytes, size) for tier in tiers]
            rooms = [(tier.capacity // weight, weight) for tier, weight in zip(tiers, weights, strict=True)]
            cache = RunCache(found, list(by_tier), rooms, lifetimes.default, stored, levels, removals)
            run_caches[name] = cache
        replicas[name] = Replica(env, name, config.engine, times, cache, slots, fast_forward, ended)

    def warm(hashes: tuple[bytes, ...]) -> Mapping[str, Depths]:
        if found is None:
            return index.longest_match(hashes)
        return {name: blocks.depths(hashes) for name, blocks in run_caches.items()}

    choose = _as_placed if as_placed else _chooser(replicas, warm, config, random.Random(seed))
    env.process(_arrivals(env, [job for job in jobs if not job.waits], arrive))
    env.run()
    end = max((job.finished for job in jobs), default=0.0)
    for replica in replicas.values():
        replica.cache.expire(end)
    progress(len(jobs))
    return Outcome(slots, stored, by_tier, removals, max(0.0, end))


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


def _as_placed(job: Job) -> Sequence[str]:
    return (job.record.replica,)


def _chooser(
    replicas: dict[str, Replica],
    warm: Callable[[tuple[bytes, ...]], Mapping[str, Depths]],
    config: Config,
    choice: random.Random,
) -> Callable[[Job], Sequence[str]]:
    """Replicas from best to worst for a job, as the live router ranks them."""
    names = list(replicas)
    if len(names) == 1:
        return lambda job: names
    turns = itertools.count()

    def choose(job: Job) -> Sequence[str]:
        hashes = job.record.hashes
        load = {name: replica.in_flight for name, replica in replicas.items()}
        view = View(names, hashes, warm(hashes), load, config.engine.max_slots, next(turns))
        return rank(view, config.routing, choice)

    return choose

"""A simulated cluster: requests arrive, are routed by prefix and load, and run on replicas that share nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import simpy

from warmkv.config import Config
from warmkv.policies.costs import StepTimes
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.routing import View, rank
from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import Tier, tiers_of
from warmkv.prefixes.index import PrefixIndex
from warmkv.simulator.cache import Removals, ReplicaCache
from warmkv.simulator.measures import Level
from warmkv.simulator.replica import Job, Replica

Progress = Callable[[int], None]  # told how many requests have arrived
PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cluster held over time; what became of each request stands in the jobs."""

    slots: Level  # bytes of decode slots, all replicas together
    stored: Level  # bytes of stored blocks and tails, all replicas together
    removals: Removals
    end: float  # virtual seconds from the first arrival to the last end


def kv_shape(config: Config) -> KVShape:
    """The configured size of the model's KV cache."""
    simulator = config.simulator
    return KVShape(simulator.layers, simulator.kv_heads, simulator.head_dim, simulator.dtype_bytes)


def simulate(
    jobs: Sequence[Job],
    config: Config,
    lifetimes: Lifetimes,
    token_bytes: int,
    times: StepTimes,
    *,
    fast_forward: bool = True,
    seed: int = 0,
    progress: Progress = lambda arrived: None,
) -> Outcome:
    """Run jobs, ordered by arrival, to their end; their outcome is written into them.

    A request that fits no replica, or finds every queue full, is refused: it gets no replica. `seed` feeds the routing,
    of which only power_of_two draws at random. `fast_forward=False` steps token by token, with equal results.
    """
    env = simpy.Environment()
    index, slots, stored, removals = PrefixIndex(), Level(), Level(), Removals()
    tiers = tiers_of(config.prefix_cache, kv_shape(config)) if config.prefix_cache.enabled else [Tier("device", 0)]
    share = config.prefix_cache.tenant_share
    replicas: dict[str, Replica] = {}
    for number in range(config.cluster.replicas):
        name = f"replica-{number}"
        cache = ReplicaCache(name, tiers, token_bytes, lifetimes, index, stored, removals, share)
        replicas[name] = Replica(env, name, config.engine, times, cache, slots, fast_forward)

    choose = _chooser(replicas, index, config, random.Random(seed))
    env.process(_arrivals(env, jobs, replicas, choose, progress))
    env.run()
    end = max((job.finished for job in jobs), default=0.0)
    for replica in replicas.values():
        replica.cache.expire(end)
    progress(len(jobs))
    return Outcome(slots, stored, removals, max(0.0, end))


def _arrivals(
    env: simpy.Environment,
    jobs: Sequence[Job],
    replicas: dict[str, Replica],
    choose: Callable[[Job], Sequence[str]],
    progress: Progress,
) -> Generator[simpy.Event, None, None]:
    for arrived, job in enumerate(jobs):
        if job.arrival > env.now:
            yield env.timeout(job.arrival - env.now)
        for replica in replicas.values():
            replica.cache.expire(env.now)
        for name in choose(job):
            replica = replicas[name]
            if not replica.full and replica.ever_fits(job):
                replica.submit(job)
                break
        if arrived % PROGRESS_EVERY == 0:
            progress(arrived)


def _chooser(
    replicas: dict[str, Replica], index: PrefixIndex, config: Config, choice: random.Random
) -> Callable[[Job], Sequence[str]]:
    """Replicas from best to worst for a job, as the live router ranks them."""
    names = list(replicas)
    if len(names) == 1:
        return lambda job: names
    turns = itertools.count()

    def choose(job: Job) -> Sequence[str]:
        hashes = job.record.hashes
        load = {name: replica.in_flight for name, replica in replicas.items()}
        view = View(names, hashes, index.longest_match(hashes), load, config.engine.max_slots, next(turns))
        return rank(view, config.routing, choice)

    return choose

"""The prefix blocks of a simulated cluster: a cache for each replica, what routers know of them, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from warmkv.config import Config
from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.tiers import Tier, tiers_of
from warmkv.prefixes.index import PUBLISH_SECONDS, Depths
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.cache.chains import MovedBlock
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.late_index import LateIndex
from warmkv.simulator.cache.layout import Layout, layout
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import Removals, ReplicaCache
from warmkv.simulator.cache.warm_start import prompts_of
from warmkv.simulator.cluster.jobs import Jobs
from warmkv.simulator.cluster.memory import pool_bytes, resolved
from warmkv.simulator.cluster.replica import Job

LayOut = Callable[[Sequence[RequestRecord]], Layout]
"""Lay out the prompts of a replay, and more prompts behind them."""


class Levels:
    """Measure what all replicas together hold over time, in bytes, and what left."""

    def __init__(self) -> None:
        self.stored, self.removals = TimeWeightedGauge(), Removals()
        self.by_tier: dict[str, TimeWeightedGauge] = {}

    def of(self, tiers: Sequence[Tier]) -> tuple[TimeWeightedGauge, ...]:
        """Return the gauges of some tiers."""
        return tuple([self.by_tier.setdefault(tier.name, TimeWeightedGauge()) for tier in tiers])


def laid_out(
    jobs: Jobs, lay_out: LayOut | None = None, held: Sequence[Contents] = (), *, generated: bool = False
) -> Layout:
    """Lay out the prompts of jobs, and what replicas hold, for `jobs` to know the blocks of each.

    With `generated` also those that answers complete, as far as they are part of other prompts.
    """
    records = jobs.records
    lay_out = lay_out or (lambda more: layout([*records, *more] if more else records))
    found = jobs.layout = lay_out(prompts_of(held, jobs.block_size))
    if generated and records.generated.counts.any():
        (wanted,) = records.generated.flat()
        places = found.places(set(records.keys_of(np.unique(wanted))))
        for number in np.flatnonzero(records.generated.counts).tolist():
            own = records.keys_of(*records.generated.of(number))
            jobs.generated[number] = tuple([places[key] for key in own if key in places])
    return found


class Stores:
    """Make the caches of replicas of one kind, and tell routers of them. Times are virtual seconds.

    `laid` are the prompts' blocks, `levels` is told what the replicas hold.
    """

    def __init__(
        self,
        config: Config,
        lifetimes: Lifetimes,
        token_bytes: int,
        block_size: int,
        laid: Layout,
        levels: Levels,
    ) -> None:
        config = resolved(config)
        cache = config.prefix_cache
        self._lifetimes, self._token_bytes, self._share = lifetimes, token_bytes, cache.tenant_share
        self._tiers = tiers_of(cache, kv_shape(config)) if cache.enabled else [Tier("device", 0)]
        if cache.enabled and config.has_one_pool:  # which evicts; tails, which are no blocks of it, have room as well
            self._tiers = [replace(tier, capacity=2 * pool_bytes(config)) for tier in self._tiers]
        self._block_size, self._layout = block_size, laid
        self._levels, self._by_tier = levels, levels.of(self._tiers)
        simulator = config.simulator
        pcie = simulator.gpu.pcie if simulator.model.is_whole else None
        self._bandwidths = {"host": simulator.host_bandwidth or pcie, "disk": simulator.disk_bandwidth}
        self._caches: dict[str, ReplicaCache] = {}
        self._late = None
        if delay := simulator.index_delay:
            self._late = LateIndex(PUBLISH_SECONDS, delay, [run.blocks for run in self._layout.runs])

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a full block in the first tier."""
        return self._weight(self._tiers[0])

    @property
    def tier_seconds(self) -> tuple[float, float]:
        """Return the seconds of reading a token from host memory, and from disk."""
        weights = {tier.name: self._weight(tier) / self._block_size for tier in self._tiers}
        host, disk = (weights.get(name, 0.0) / rate if rate else 0.0 for name, rate in self._bandwidths.items())
        return host, disk

    def new(self, name: str) -> ReplicaCache:
        """Make the empty cache of a replica that starts."""
        self._caches[name] = ReplicaCache(
            name, self._layout, self._tiers, self._token_bytes, self._lifetimes, self._levels.stored,
            self._levels.removals, self._share, self._by_tier, self._late,
        )  # fmt: skip
        return self._caches[name]

    def live(self, lifetimes: Lifetimes, now: float) -> None:
        """Let what is stored from now on live so long."""
        self._lifetimes = lifetimes
        for cache in self._caches.values():
            cache.lifetimes = lifetimes

    def drop(self, name: str, cache: ReplicaCache, now: float) -> None:
        """Drop the cache of a replica that is gone."""
        cache.expire(now)
        cache.drop(now)
        del self._caches[name]

    def warm(self, job: Job, now: float) -> dict[str, Depths]:
        """Return leading blocks of a job's prompt that each replica holds, as the routers know it."""
        if self._late is not None:
            return self._late.warm(job.blocks.runs, now)
        runs = job.blocks.runs
        return {name: depths for name, cache in self._caches.items() if (depths := cache.depths(runs))[2]}

    def holders(self, block: MovedBlock) -> list[str]:
        """Return the replicas that hold a block, in any tier."""
        return [name for name, cache in self._caches.items() if cache.chains.has(block)]

    def _weight(self, tier: Tier) -> int:
        return tier.weigh(self._block_size * self._token_bytes, self._block_size)

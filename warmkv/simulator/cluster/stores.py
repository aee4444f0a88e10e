"""The prefix blocks of a simulated cluster: a cache for each replica, what routers know of them, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from warmkv.config import Config
from warmkv.policies.eviction import lru
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.tiers import Tier, tiers_of
from warmkv.prefixes.index import PUBLISH_SECONDS, Depths, PrefixIndex
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.late_index import LateIndex
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import Removals, ReplicaCache
from warmkv.simulator.cache.runs import Layout, RunCache, Runs, layout
from warmkv.simulator.cluster.memory import resolved
from warmkv.simulator.cluster.replica import Job


class Stores:
    """The caches of all replicas. Times are virtual seconds.

    With `by_runs` blocks that always come together are followed as one, where that is exact.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        config: Config,
        lifetimes: Lifetimes,
        token_bytes: int,
        *,
        by_runs: bool,
        lay_out: Callable[[], Layout | None] | None = None,
    ) -> None:
        config = resolved(config)
        cache = config.prefix_cache
        self._lifetimes, self._token_bytes, self._share = lifetimes, token_bytes, cache.tenant_share
        self._tiers = tiers_of(cache, kv_shape(config)) if cache.enabled else [Tier("device", 0)]
        self._block_size = jobs[0].record.block_size if jobs else 1
        self.stored, self.removals = TimeWeightedGauge(), Removals()
        self.by_tier: Mapping[str, TimeWeightedGauge] = {tier.name: TimeWeightedGauge() for tier in self._tiers}
        simulator = config.simulator
        pcie = simulator.gpu.pcie if simulator.model.is_whole else None
        self._bandwidths = {"host": simulator.host_bandwidth or pcie, "disk": simulator.disk_bandwidth}
        delay = simulator.index_delay
        self.index = PrefixIndex()
        self._late = LateIndex(PUBLISH_SECONDS, delay) if delay else None
        hands_over = config.cluster.autoscaling is not None and config.cluster.handover_seconds > 0
        self._layout = None
        if by_runs and not delay and not hands_over and follows_runs(jobs, config, self._tiers, lifetimes):
            self._layout = lay_out() if lay_out is not None else layout([job.record.hashes for job in jobs])
        self._runs: dict[str, Runs] = {}  # by request
        if self._layout is not None:
            self._runs = dict(zip((job.record.id for job in jobs), self._layout.runs, strict=True))
            if len(self._runs) < len(jobs):  # some share an id
                self._layout = None
        self._run_caches: dict[str, RunCache] = {}

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

    def new(self, name: str) -> ReplicaCache | RunCache:
        """Make the empty cache of a replica that starts."""
        levels = tuple(self.by_tier.values())
        if self._layout is None:
            return ReplicaCache(
                name, self._tiers, self._token_bytes, self._lifetimes, self.index, self.stored, self.removals,
                self._share, levels, self._late,
            )  # fmt: skip
        rooms = [(tier.capacity // self._weight(tier), self._weight(tier)) for tier in self._tiers]
        tiers, ttl = list(self.by_tier), self._lifetimes.default
        self._run_caches[name] = RunCache(
            self._layout, self._runs, tiers, rooms, ttl, self.stored, levels, self.removals
        )
        return self._run_caches[name]

    def drop(self, name: str, cache: ReplicaCache | RunCache, now: float) -> None:
        """Drop the cache of a replica that is gone."""
        cache.expire(now)
        cache.drop(now)
        self._run_caches.pop(name, None)
        if self._late is not None:
            self._late.drop_replica(name)

    def warm(self, record: RequestRecord, now: float) -> Mapping[str, Depths]:
        """Return leading blocks of a prompt that each replica holds, as the routers know it."""
        if self._layout is not None:
            runs = self._runs[record.id]
            warm = {}
            for name, cache in self._run_caches.items():
                depths = cache.depths(runs)
                if depths[-1]:
                    warm[name] = depths
            return warm
        index = self.index if self._late is None else self._late.at(now)
        return index.longest_match(record.hashes)

    def _weight(self, tier: Tier) -> int:
        return tier.weigh(self._block_size * self._token_bytes, self._block_size)


def follows_runs(jobs: Sequence[Job], config: Config, tiers: Sequence[Tier], lifetimes: Lifetimes) -> bool:
    """Return True if a `RunCache` does with the blocks of the prompts what the indexes do, if they can be laid out as
    runs.
    """
    settings = config.prefix_cache
    plain = all(tier.order is lru for tier in tiers) and not settings.tenant_share and lifetimes.automatic
    if not plain or len({job.record.block_size for job in jobs}) != 1:
        return False
    return not any(job.marks or job.record.reads or job.sum_bytes for job in jobs)

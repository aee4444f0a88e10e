"""A simulated cluster: requests arrive, are routed by prefix and load, and run on replicas that share nothing.

Replicas may be of several kinds (`cluster.groups`): a request goes to those that can serve its policy, by the rule of
the live gateways.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from warmkv.config import Config, move_blocks
from warmkv.policies.breaker import retry_pause
from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes.index import Depths
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import Removals, ReplicaCache
from warmkv.simulator.cluster.clock import FIRST, Alarm, Clock
from warmkv.simulator.cluster.fleet import Fleet
from warmkv.simulator.cluster.gateways import SimulatedGateway
from warmkv.simulator.cluster.jobs import Jobs
from warmkv.simulator.cluster.line import Line
from warmkv.simulator.cluster.memory import resolved
from warmkv.simulator.cluster.mixed_limits import entry_bytes, mixed_limits
from warmkv.simulator.cluster.replica import ONE_GROUP, Job, SimulatedReplica
from warmkv.simulator.cluster.stores import LayOut, Levels, Stores, laid_out
from warmkv.simulator.cluster.transfers import Moved
from warmkv.simulator.engine.formation import NEVER
from warmkv.simulator.engine.limits import Limits
from warmkv.simulator.steps.costs import StepKind, StepTimes, times_of

Progress = Callable[[int], None]  # told how many requests have arrived
PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cluster held over time; what became of each request stands in `Jobs`."""

    slots: TimeWeightedGauge  # bytes of decode slots, all replicas together
    stored: TimeWeightedGauge  # bytes of stored blocks and tails, all replicas and tiers together
    tiers: Mapping[str, TimeWeightedGauge]  # the same, tier by tier
    removals: Removals
    alive: TimeWeightedGauge  # replicas, those that start included
    alive_of: Mapping[str, TimeWeightedGauge]  # the same, by group
    moved: Moved  # between replicas
    end: float  # virtual seconds from the first arrival to the last end


def simulate(
    jobs: Jobs,
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
    later: Sequence[tuple[float, Lifetimes]] = (),
    progress: Progress = lambda arrived: None,
) -> Outcome:
    """Run jobs to their end; they keep what became of each.

    A job that waits for another arrives its think time after that one ended, or was refused.

    Where no replica has room a request waits in line in its gateway. One that fits none, or finds the line full, is
    refused: it gets no replica. `seed` feeds the routing, of which only power_of_two draws at random.
    `fast_forward=False` steps token by token, with equal results.
    `as_placed` sends every request to the replica that its record names: those are the cluster from beginning to end.
    `lay_out` gives the blocks of the prompts, and of more prompts, as runs, where whoever calls keeps them.

    The first replicas begin with what is `held`, one after the other, the others empty; the clock starts at the Unix
    time `begun`. `later` are lifetimes in place of the first ones, from virtual times on.

    Raises BatchingError if a request could not be batched as `simulator.batching: mixed` does.
    """
    groups = {name: resolved(group) for name, group in config.groups().items()}
    laid = laid_out(jobs, lay_out, held, generated=any(group.has_one_pool for group in groups.values()))
    levels, block_size = Levels(), jobs.block_size
    kinds = {
        name: ReplicaKind(
            group,
            Stores(group, lifetimes, token_bytes, block_size, laid, levels),
            times_of(times, name),
            mixed_limits(jobs, group, token_bytes, name) if group.batches_as_vllm else None,
            group.prefix_cache.keep_warm // (block_size * entry_bytes(group, token_bytes)),
        )
        for name, group in groups.items()
    }
    return Cluster(jobs, config, kinds, levels, fast_forward, as_placed, seed, progress).run(held, begun, later)


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """Hold what replicas of a group share: settings, caches and step times, and limits if they batch as vLLM does."""

    config: Config
    stores: Stores
    times: StepTimes
    mixed: Limits | None
    keep_warm: int = 0  # blocks


class Cluster:
    """Bring requests through the gateways to the replicas, in SimPy's time. `kinds` are those of each group."""

    def __init__(
        self,
        jobs: Jobs,
        config: Config,
        kinds: Mapping[str, ReplicaKind],
        levels: Levels,
        fast_forward: bool,
        as_placed: bool,
        seed: int,
        progress: Progress,
    ) -> None:
        self._jobs, self._config, self._kinds, self._levels = jobs, config, kinds, levels
        self._fast_forward, self._as_placed, self._progress = fast_forward, as_placed, progress
        self._env, self._slots, self._moved = Clock(), TimeWeightedGauge(), Moved()
        count = config.cluster.gateways
        warm = self._warm if len(kinds) > 1 else kinds[""].stores.warm
        self._gateways = [
            SimulatedGateway(config, warm, count == 1, random.Random(seed + number), lambda: self._env.now)
            for number in range(count)
        ]
        told = self._ready, self._gone, self._lost, self._moved
        self._fleets = {
            group: Fleet(
                self._env, kind.config, kind.stores, partial(self._replica, group), *told,
                f"replica-{group}" if group else "replica",
            )
            for group, kind in kinds.items()
        }  # fmt: skip
        self._group_of: dict[str, str] = {}  # by the name of a replica
        self._capabilities = config.capabilities
        self._moves: dict[tuple[str, ...], bool] = {}  # by the groups that may get a request
        self._counted: dict[int, str] = {}  # the group whose autoscaling counts a request
        self._scales = any(kind.config.cluster.autoscaling is not None for kind in kinds.values())
        # The only fleet, if it never has two replicas: then there is nothing to choose, and nobody asks what is booked.
        single = len(kinds) == 1 and config.cluster.replicas == 1 and not (self._scales or as_placed)
        self._single = self._fleets[""] if single else None
        self._line = Line(config.cluster.max_queued_requests)
        self._arrived = 0
        self._left = len(jobs)  # jobs that have not ended

    def run(
        self, held: Sequence[Contents] = (), begun: float = 0.0, later: Sequence[tuple[float, Lifetimes]] = ()
    ) -> Outcome:
        """Run until all jobs have ended. What is `held` is there when the clock starts, at the Unix time `begun`."""
        for at, lifetimes in later:
            for kind in self._kinds.values():
                self._env.set(Alarm(partial(kind.stores.live, lifetimes)), at)
        placed = self._placed() if self._as_placed else {}
        for group, fleet in self._fleets.items():
            if self._as_placed:
                fleet.open_named(sorted(placed.get(group, ())))
            else:
                fleet.open()
            own = [contents for contents in held if contents.group == group or len(self._fleets) == 1]
            for replica, contents in zip(fleet.serving.values(), own, strict=False):
                replica.restore(contents, begun)
        if not len(self._jobs):
            self._close()
        _arrivals(self._env, self._jobs, self._arrive)
        self._env.run()
        end = max(0.0, max(self._jobs.finished, default=0.0))
        for fleet in self._fleets.values():
            for cache in fleet.caches:
                cache.expire(end)
        self._progress(len(self._jobs))
        levels, alive = self._levels, {name: fleet.alive for name, fleet in self._fleets.items()}
        all_alive = alive[""] if len(alive) == 1 else TimeWeightedGauge.together(alive.values())
        return Outcome(self._slots, levels.stored, levels.by_tier, levels.removals, all_alive, alive, self._moved, end)

    def _placed(self) -> Mapping[str, set[str]]:
        """Return the names of the replicas that records name, by group; their requests go nowhere else."""
        placed: dict[str, set[str]] = {}
        records = self._jobs.records
        if len(self._fleets) > 1:
            self._jobs.groups = [(group,) for group in records.values("group")]
        for number, replica in enumerate(records.values("replica")):
            (group,) = self._jobs.groups[number] if self._jobs.groups else ONE_GROUP
            placed.setdefault(group, set()).add(replica)
        return placed

    def _close(self) -> None:
        for fleet in self._fleets.values():
            fleet.close()

    # --- a request comes and goes

    def _arrive(self, job: Job) -> None:
        if self._arrived % PROGRESS_EVERY == 0:
            self._progress(self._arrived)
        job.gateway = self._arrived % len(self._gateways)
        self._arrived += 1
        if job.shares:
            self._gateways[job.gateway].writers.arrived(job.number, self._env.now)
        self._send(job)

    def _send(self, job: Job) -> None:
        """Hand a job to the best replica that has room, or let it wait in line."""
        if self._single is not None and self._single.names:
            (name,) = self._single.names
            replica, now = self._single.serving[name], self._env.now
            if replica.cache.deadlines.due <= now:
                replica.cache.expire(now)
            if not replica.full and replica.ever_fits(job):
                replica.submit(job)
            else:
                self._wait(job, ONE_GROUP)
            return
        now, gateway = self._env.now, self._gateways[job.gateway]
        groups = tuple([name for name, fleet in self._fleets.items() if name in job.groups and fleet.serving])
        if len(groups) == 1:
            names: Sequence[str] = self._fleets[groups[0]].names
        else:
            names = [name for group in groups for name in self._fleets[group].names]
        own = (job.records.name("replica", job.number),) if self._as_placed else ()
        if all(self._serving(name).full for name in own or names):  # a decision would be for nothing
            self._wait(job, groups, own)
            return
        for fleet in self._fleets.values():
            for cache in fleet.caches:
                if cache.deadlines.due <= now:
                    cache.expire(now)
        moves = self._moves.get(groups)
        if moves is None:
            moves = self._moves[groups] = move_blocks([self._capabilities[group] for group in groups])
        whole = len(names) == sum(len(fleet.transfers) for fleet in self._fleets.values())
        order, fetch = gateway.choose(job, names, now, moves=moves, whole=whole)
        for name in own or order:
            fleet, replica = self._fleets[self._group_of[name]], self._serving(name)
            if not replica.full and replica.ever_fits(job):
                if self._scales:
                    self._count(job.number, self._group_of[name])
                fleet.transfers[name].take(job, fetch)
                gateway.sent(job, name, replica.ongoing)
                return
        gateway.in_flight.release(job.number)  # it was booked on the best
        self._wait(job, groups, own)

    def _serving(self, name: str) -> SimulatedReplica:
        return self._fleets[self._group_of[name]].serving[name]

    def _wait(self, job: Job, groups: Sequence[str], own: Sequence[str] = ()) -> None:
        """Let a job wait for a replica that can hold it; refuse it if none of these groups can, or the line is full."""
        unable = [group for group in groups if not next(iter(self._fleets[group].serving.values())).ever_fits(job)]
        if groups and len(unable) == len(groups):
            self._refuse(job, too_large=True)
            return
        if self._scales:
            self._count(job.number, None)
        places = own or [group for group in job.groups if group not in unable]
        if not self._line.join(job, places):
            self._refuse(job)

    def _serve_line(self, name: str) -> None:
        """Send requests that wait in line, while a replica has room for them."""
        group = self._group_of[name]
        place = name if self._as_placed else group
        replica = self._fleets[group].serving.get(name)
        while replica is not None and not replica.full and (job := self._line.take(place)) is not None:
            self._send(job)

    def _warm(self, job: Job, now: float) -> dict[str, Depths]:
        """Return leading blocks of a job's prompt that replicas of all groups hold."""
        return {name: depths for kind in self._kinds.values() for name, depths in kind.stores.warm(job, now).items()}

    def _count(self, number: int, group: str | None) -> None:
        """Let the autoscaling of a group count a request, and that of another one no more."""
        if (before := self._counted.pop(number, None)) is not None:
            self._fleets[before].count(-1)
        if group is not None:
            self._counted[number] = group
            self._fleets[group].count(1)

    def _refuse(self, job: Job, *, too_large: bool = False) -> None:
        job.too_large = too_large
        job.replica, job.started, job.first, job.finished = "", NEVER, NEVER, NEVER
        self._over(job)

    def _began(self, job: Job) -> None:
        """Bill a computed prompt: a request that came before a prefix was stored is billed as writing it, too."""
        gateway = self._gateways[job.gateway]
        if self._single is None:
            gateway.in_flight.began(job.number)
        if job.resumptions:
            return
        if self._single is None:
            self._fleets[self._group_of[job.replica]].transfers[job.replica].computed(job)
        if job.shares:
            hit, written = job.hit, job.written
            reads = [(read.position, read.number) for read in job.blocks.reads] if hit else ()
            marks = [(write.position, write.number) for write in job.blocks.writes] if hit < written else ()
            job.read = gateway.writers.began(job.number, job.replica, reads, marks, hit, written, self._env.now)

    def _ended(self, job: Job) -> None:
        self._over(job)
        if self._scales:  # else none is drained
            self._fleets[self._group_of[job.replica]].ended(job.replica)
        if self._line:
            self._serve_line(job.replica)

    def _over(self, job: Job) -> None:
        gateway = self._gateways[job.gateway]
        if self._single is None:
            gateway.in_flight.release(job.number)
        if self._scales:
            self._count(job.number, None)
        if job.shares:
            gateway.writers.left(job.number)
        job.known_keys = None
        self._jobs.keep(job)
        following = self._jobs.following(job.number)
        if following is not None:
            think = self._jobs.think(following.number)
            wait = self._kinds[self._group_of.get(job.replica, "")].times.overhead + think
            following.arrival = self._env.now + wait
            self._env.timeout(wait).callbacks.append(lambda _: self._arrive(following))
        self._left -= 1
        if not self._left:
            self._close()

    # --- replicas come and go

    def _replica(self, group: str, name: str, cache: ReplicaCache) -> SimulatedReplica:
        kind = self._kinds[group]
        config = kind.config
        self._group_of[name] = group
        for gateway in self._gateways:
            gateway.opened(name, config.engine.max_slots)
        return SimulatedReplica(
            self._env,
            name,
            config.engine,
            kind.times,
            cache,
            self._slots,
            fast_forward=self._fast_forward,
            began=self._began,
            ended=self._ended,
            tier_seconds=kind.stores.tier_seconds,
            mixed=kind.mixed,
            stores=config.prefix_cache.enabled,
            whole_cache=StepKind.of(config.whole_cache),
            one_pool=config.has_one_pool,
            keep_warm=kind.keep_warm,
        )

    def _ready(self, name: str) -> None:
        if self._line:
            self._serve_line(name)

    def _gone(self, name: str) -> None:
        for gateway in self._gateways:
            gateway.in_flight.drop(name)

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
            if pause := retry_pause(attempts):
                self._env.timeout(pause).callbacks.append(lambda _, job=job: self._send(job))
            else:
                self._send(job)


def _arrivals(clock: Clock, jobs: Jobs, arrive: Callable[[Job], None]) -> None:
    """Let jobs arrive, each at its time: those of now at once, then each by an alarm that is set when it is next."""
    coming = jobs.arriving()
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

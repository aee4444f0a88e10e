"""Blocks on their way between simulated replicas: decided, fetched and handed over as the live replicas do it.

A fetch takes `transfer.start_seconds` and `transfer.byte_seconds` for each byte, whatever else is on the way. What
arrives lives its TTL from then on, for the request that it was fetched for is about to read it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from warmkv.config import TransferConfig
from warmkv.policies.retention import Entry
from warmkv.policies.transfer import Fetch, TransferTimes, heir
from warmkv.prefixes.index import PrefixIndex
from warmkv.simulator.cache import Parcel, ReplicaCache
from warmkv.simulator.replica import Job, Replica

REMEMBERED = 256  # prefills; older ones count for nothing beside them
Process = Generator[simpy.Event, Any, Any]


@dataclass(slots=True)
class Moved:
    """What moved between all replicas so far."""

    fetches: int = 0  # that brought something
    fetched_bytes: int = 0
    handed_bytes: int = 0


class Transfers:
    """What one replica fetches from others. `donors` finds a replica by its name, if it is there."""

    def __init__(
        self,
        env: simpy.Environment,
        replica: Replica,
        config: TransferConfig,
        block_bytes: int,
        donors: Callable[[str], Replica | None],
        moved: Moved,
    ) -> None:
        self._env, self._replica, self._config = env, replica, config
        self._block_bytes, self._donors, self._moved = block_bytes, donors, moved
        self._flights: dict[bytes, simpy.Process] = {}  # by the blocks that they are to bring
        self._room = simpy.Resource(env, config.concurrent)
        self._times = TransferTimes.of(config)
        self._prefills: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # tokens and seconds, not yet in `_times`
        self._open = True
        self.preparing: dict[Job, None] = {}  # requests that wait for blocks

    def computed(self, job: Job) -> None:
        """Learn from a prompt how long prefill takes here."""
        if tokens := job.record.input_tokens - job.reused:
            self._prefills.append((tokens, self._env.now - job.started))

    def take(self, job: Job, plan: Fetch | None) -> None:
        """Hand a job to the replica, and before that fetch what it lacks, if its router knows where that is."""
        if plan is None or plan.donor == self._replica.name:
            self._replica.submit(job)
            return
        self._replica.expect()
        self.preparing[job] = None
        self._env.process(self._prepare(job, plan))

    def close(self) -> list[Job]:
        """The replica is gone; the requests that were waiting for blocks."""
        self._open = False
        return list(self.preparing)

    def _prepare(self, job: Job, plan: Fetch) -> Process:
        env, deadline = self._env, self._env.now + self._config.timeout_seconds
        keys = job.record.hashes[: plan.blocks]
        while env.now < deadline:
            memory, held = self._replica.cache.leading(job.record, plan.blocks, env.now)
            if held == plan.blocks:
                break
            flight = self._flights.get(keys[memory])
            own = flight is None
            if flight is None:
                if self._gain(job, len(keys) - held, len(keys) - memory) <= 0:
                    self._times = self._times.declined()
                    break
                flight = env.process(self._fly(job, plan))
                self._flights |= dict.fromkeys(keys[memory:], flight)
            yield flight | env.timeout(deadline - env.now)
            if not self._open:
                return
            if own or not flight.triggered or not flight.value:
                break
        del self.preparing[job]
        self._replica.submit(job, expected=True)

    def _gain(self, job: Job, computed: int, fetched: int) -> float:
        """Seconds that fetching these blocks saves."""
        while self._prefills:
            self._times = self._times.computed(*self._prefills.popleft())
        return self._times.gain(computed * job.record.block_size, fetched * self._block_bytes)

    def _fly(self, job: Job, plan: Fetch) -> Process:
        """Fetch blocks piece by piece, those that are lacking in memory; whether any came."""
        env, config, cache = self._env, self._config, self._replica.cache
        deadline, total = env.now + config.timeout_seconds, 0
        with self._room.request() as room:
            yield room | env.timeout(config.timeout_seconds)
            began, wait, more = env.now, config.start_seconds, room.triggered
            while more and self._open:
                cache.expire(env.now)
                first, _ = cache.leading(job.record, plan.blocks, env.now)
                donor = self._donors(plan.donor)
                if first == plan.blocks or donor is None:
                    break
                donor.cache.expire(env.now)
                most, sums = int(config.piece_bytes), bool(job.sum_bytes)
                parcel = donor.cache.lend(job.record, first, plan.blocks, most, sums, env.now)
                seconds, wait = wait + parcel.nbytes * config.byte_seconds, 0.0
                late = env.now + seconds >= deadline
                yield env.timeout(max(0.0, deadline - env.now) if late else seconds)
                if late or not self._open or not parcel.nbytes or self._donors(plan.donor) is not donor:
                    break
                cache.expire(env.now)
                cache.adopt(job.record, parcel, env.now)
                total += parcel.nbytes
                more = parcel.more and cache.leading(job.record, parcel.blocks, env.now)[1] == parcel.blocks
        this = env.active_process
        self._flights = {key: flight for key, flight in self._flights.items() if flight is not this}
        if self._open and room.triggered:
            self._times = self._times.fetched(total, env.now - began)
            self._moved.fetches += total > 0
            self._moved.fetched_bytes += total
        return total > 0


def hand_over(
    env: simpy.Environment,
    cache: ReplicaCache,
    peers: Mapping[str, Replica],
    index: PrefixIndex,
    config: TransferConfig,
    moved: Moved,
    there: Callable[[], bool],
) -> Process:
    """Give the hottest chains of a replica that is stopped to the others, within the limits, while it is `there`.

    `peers` are those that take requests, now and later; `index` tells what they hold.
    """
    deadline = env.now + config.handover_seconds
    cache.expire(env.now)
    chains = cache.hottest(int(config.handover_bytes), env.now)
    names = {entry.key: [name for name in index.holders(entry.key) if name in peers] for c in chains for entry in c}
    batches: dict[str, list[Sequence[Entry]]] = {}
    sizes: Counter[str] = Counter()

    def send(name: str) -> Process:
        seconds = config.start_seconds + sizes[name] * config.byte_seconds
        late = seconds > min(deadline - env.now, config.timeout_seconds)
        yield env.timeout(min(seconds, max(0.0, deadline - env.now), config.timeout_seconds))
        parcel = Parcel(sizes.pop(name), chains=batches.pop(name))
        heir_cache = peers[name].cache if name in peers else None
        if there() and not late and isinstance(heir_cache, ReplicaCache):
            heir_cache.expire(env.now)
            heir_cache.take_over(parcel, env.now)
            moved.handed_bytes += parcel.nbytes

    for chain in chains:
        if not (peers and there()) or env.now >= deadline:
            return
        keys = [entry.key for entry in chain]
        name, known = heir(keys, sorted(peers), names)
        if known == len(chain):
            continue
        batches.setdefault(name, []).append(chain)
        for entry in chain[known:]:
            if name not in names[entry.key]:
                names[entry.key].append(name)
                sizes[name] += entry.size
        if sizes[name] >= config.piece_bytes:
            yield from send(name)
    for name in list(batches):
        yield from send(name)

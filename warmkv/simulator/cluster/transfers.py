"""Blocks on their way between simulated replicas: decided, fetched and handed over as the live replicas do it.

A fetch takes `START_SECONDS` and `transfer.byte_seconds` for each byte, whatever else is on the way. What arrives lives
its TTL from then on, for the request that it was fetched for is about to read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from warmkv.policies.transfer import (
    CONCURRENT,
    HANDOVER_BYTES,
    Fetch,
    TransferTerms,
    TransferTimes,
    choose_successor,
    pieces,
)
from warmkv.simulator.cache.chains import Chain, MovedBlock
from warmkv.simulator.cache.replica_cache import ReplicaCache
from warmkv.simulator.cluster.replica import Job, SimulatedReplica

REMEMBERED = 256  # prefills; older ones count for nothing beside them
Process = Generator[simpy.Event, Any, Any]


@dataclass(slots=True)
class Moved:
    """What moved between all replicas so far."""

    fetches: int = 0  # that brought something
    declined: int = 0  # not made, since to compute was faster
    fetched_bytes: int = 0
    handed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Flight:
    """A fetch on its way. Its value is whether it brought anything."""

    job: Job  # for which it was made
    process: simpy.Process


class SimulatedTransfers:
    """What one replica fetches from others. `donors` finds a replica by its name, if it is there."""

    def __init__(
        self,
        env: simpy.Environment,
        replica: SimulatedReplica,
        terms: TransferTerms,
        block_bytes: int,
        donors: Callable[[str], SimulatedReplica | None],
        moved: Moved,
    ) -> None:
        self._env, self._replica, self._terms = env, replica, terms
        self._block_bytes, self._donors, self._moved = block_bytes, donors, moved
        self._flights: dict[int, Flight] = {}  # by the blocks that they are to bring
        self._room = simpy.Resource(env, CONCURRENT)
        self._times = TransferTimes.of(terms)
        self._prefills: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # tokens and seconds, not yet in `_times`
        self._open = True
        self.preparing: dict[Job, None] = {}  # requests that wait for blocks

    def computed(self, job: Job) -> None:
        """Learn from a prompt how long prefill takes here."""
        if tokens := job.prompt - job.reused:
            self._prefills.append((tokens, self._env.now - job.started))

    def take(self, job: Job, fetch: Fetch | None) -> None:
        """Hand a job to the replica, and before that fetch what it lacks, if its router knows where that is."""
        flight = None if fetch is None or fetch.donor == self._replica.name else self._flight(job, fetch)
        if fetch is None or flight is None:
            self._replica.submit(job)
            return
        self._replica.expect()
        self.preparing[job] = None
        self._env.process(self._prepare(job, fetch, flight))

    def close(self) -> list[Job]:
        """Close the transfers of a lost replica; return the requests that waited for blocks, once."""
        self._open = False
        waited, self.preparing = list(self.preparing), {}
        return waited

    def _prepare(self, job: Job, fetch: Fetch, flight: Flight | None) -> Process:
        """Wait for blocks, those that others fetch first, and then for what is lacking still; but not for too long."""
        deadline = self._env.now + self._terms.timeout_seconds
        while flight is not None and self._env.now < deadline:
            yield flight.process | self._env.timeout(deadline - self._env.now)
            if not self._open:
                return
            if flight.job is job or not flight.process.triggered or not flight.process.value:
                break
            flight = self._flight(job, fetch)
        del self.preparing[job]
        self._replica.submit(job, expected=True)

    def _flight(self, job: Job, fetch: Fetch) -> Flight | None:
        """Return the fetch to wait for: another job's for the same blocks, or a new one if faster than computing."""
        _, memory, held = self._replica.cache.leading(job.blocks, fetch.blocks, self._env.now)
        if held == fetch.blocks:
            return None
        keys = job.keys[memory : fetch.blocks]
        flight = self._flights.get(keys[0])
        if flight is None:
            if self._gain(job, fetch.blocks - held, len(keys)) <= 0 and not fetch.always:
                self._times = self._times.declined()
                self._moved.declined += 1
                return None
            flight = Flight(job, self._env.process(self._fly(job, fetch)))
            self._flights |= dict.fromkeys(keys, flight)
        return flight

    def _gain(self, job: Job, computed: int, fetched: int) -> float:
        """Return seconds that fetching these blocks saves."""
        while self._prefills:
            self._times = self._times.computed(*self._prefills.popleft())
        return self._times.gain(computed * job.block_size, fetched * self._block_bytes)

    def _fly(self, job: Job, fetch: Fetch) -> Process:
        """Fetch blocks piece by piece, those that are lacking in memory; whether any came."""
        env, terms, cache = self._env, self._terms, self._replica.cache
        deadline, total, lost = env.now + terms.timeout_seconds, 0, False
        with self._room.request() as room:
            yield room | env.timeout(terms.timeout_seconds)
            began, wait, more = env.now, terms.start_seconds, room.triggered
            while more and self._open:
                cache.expire(env.now)
                _, first, _ = cache.leading(job.blocks, fetch.blocks, env.now)
                if first == fetch.blocks:
                    break
                donor = self._donors(fetch.donor)
                if donor is None:
                    lost = True
                    break
                donor.cache.expire(env.now)
                sums = bool(job.sum_bytes)
                transfer = donor.cache.chains.lend(job.blocks, first, fetch.blocks, terms.piece_bytes, sums, env.now)
                seconds, wait = wait + transfer.nbytes * terms.byte_seconds, 0.0
                late = env.now + seconds >= deadline
                yield env.timeout(max(0.0, deadline - env.now) if late else seconds)
                lost = self._donors(fetch.donor) is not donor
                if late or lost or not self._open or not transfer.nbytes:
                    break
                cache.expire(env.now)
                cache.adopt(job.blocks, transfer, env.now)
                total += transfer.nbytes
                more = transfer.more and cache.leading(job.blocks, transfer.blocks, env.now)[2] == transfer.blocks
        self._flights = {key: flight for key, flight in self._flights.items() if flight.job is not job}
        if self._open and room.triggered:
            if not lost:  # what fails tells nothing of the next
                self._times = self._times.fetched(total, env.now - began)
            self._moved.fetches += total > 0
            self._moved.fetched_bytes += total
        return total > 0


@dataclass(frozen=True, slots=True)
class ChainSlice:
    """Entries of a chain, from number `first` on and before `last`."""

    chain: Chain
    first: int
    last: int


def pieces_of(parts: Sequence[ChainSlice], most: int) -> list[list[ChainSlice]]:
    """Split entries into pieces of at most `most` bytes, at least one entry each."""
    entries = [(part.chain, at) for part in parts for at in range(part.first, part.last)]
    found: list[list[ChainSlice]] = []
    for piece in pieces((chain[at].size for chain, at in entries), most):
        found.append([])
        for chain, at in entries[piece.start : piece.stop]:
            if found[-1] and found[-1][-1].chain is chain:
                found[-1][-1] = ChainSlice(chain, found[-1][-1].first, at + 1)
            else:
                found[-1].append(ChainSlice(chain, at, at + 1))
    return found


def hand_over(
    env: simpy.Environment,
    cache: ReplicaCache,
    names: Sequence[str],
    peer: Callable[[str], ReplicaCache | None],
    holders_of: Callable[[MovedBlock], list[str]],
    terms: TransferTerms,
    moved: Moved,
    there: Callable[[], bool],
) -> Process:
    """Give the hottest chains of a replica that is stopped to others, within the limits, while it is `there`.

    `names` are those that take requests, `peer` finds the cache of one that still does, `holders_of` who holds
    a block. What one fails to take goes to the others.
    """
    deadline = env.now + terms.handover_seconds
    cache.expire(env.now)
    chains: Sequence[Chain] = cache.chains.hottest(HANDOVER_BYTES, env.now)
    holders = {entry.key: holders_of(entry) for chain in chains for entry in chain}

    def give(name: str, share: Sequence[Sequence[ChainSlice]]) -> Process:
        """Offer piece after piece; the number of those that were taken."""
        for number, piece in enumerate(share):
            nbytes = sum(entry.size for part in piece for entry in part.chain[part.first : part.last])
            seconds = terms.start_seconds + nbytes * terms.byte_seconds
            yield env.timeout(min(seconds, terms.timeout_seconds))
            if not there() or env.now > deadline:
                return len(share)
            heir_cache = peer(name)
            if seconds > terms.timeout_seconds or heir_cache is None:
                return number
            heir_cache.expire(env.now)
            for part in piece:
                if heir_cache.chains.holds(part.chain[: part.first], env.now):
                    heir_cache.take_over([part.chain[: part.last]], env.now)
            moved.handed_bytes += nbytes
        return len(share)

    while chains and names and there() and env.now < deadline:
        parts: dict[str, list[ChainSlice]] = {name: [] for name in names}
        for chain in chains:
            keys = [entry.key for entry in chain]
            name, known = choose_successor(keys, names, holders)
            parts[name].append(ChainSlice(chain, known, len(chain)))
            for key in keys[known:]:
                holders[key] = [*holders[key], name]
        shares = {name: pieces_of(part, terms.piece_bytes) for name, part in parts.items()}
        given = {name: env.process(give(name, share)) for name, share in shares.items()}
        yield env.all_of(given.values()) | env.timeout(deadline - env.now)
        taken = {name: process.value if process.triggered else len(shares[name]) for name, process in given.items()}
        names = [name for name in names if taken[name] == len(shares[name])]
        rests = [part.chain for name, count in taken.items() for piece in shares[name][count:] for part in piece]
        chains = list({chain[-1].key: chain for chain in rests}.values())

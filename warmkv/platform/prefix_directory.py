"""The authority on which replica holds which block, fed by the replicas' events and followed by the routers.

Events come in batches with sequence numbers. A gap, or an actor that has restarted empty, is healed by asking the
replica for a snapshot. Routers keep a copy of the index and follow the changes, so a routing decision makes no call.
The blocks may be shared among several actors (`directory.shards`), each of which then works as if it were alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from warmkv import recorders, telemetry
from warmkv.config import DirectoryConfig
from warmkv.platform import named_actors
from warmkv.prefixes.index import PrefixIndex, Shard
from warmkv.prefixes.mask_table import KEY_BYTES, numbers
from warmkv.replicas.protocol import BlockEvents

TICK_SECONDS = 1.0  # between two looks for replicas that are silent
SILENT_TICKS = 15  # after which a replica that has not reported is forgotten
FOLLOW_SECONDS = 10.0  # that a router waits for changes before it asks again
LOG_PART = 5  # of max_blocks one in so many is kept as changes, for routers that catch up; others get everything anew
PIECE = 10_000  # blocks that a router takes in at once: a few milliseconds
_CHANGE_BYTES = 256  # of a change in the log, beside its keys


@dataclass(frozen=True, slots=True)
class Change:
    """Tell what happened to one replica's blocks, as packed keys; `reset` forgets what it held before."""

    replica: str
    stored: bytes = b""
    evicted: bytes = b""
    tier: str = "device"  # the fastest that has what was stored
    reset: bool = False
    gone: bool = False
    at: float | None = None  # when it happened, by the replica's wall clock

    @property
    def size(self) -> int:
        return 1 + (len(self.stored) + len(self.evicted)) // KEY_BYTES


@dataclass(frozen=True, slots=True)
class Update:
    """Answer to a follower: the changes that lead from its version to `version`."""

    epoch: str
    version: int
    changes: tuple[Change, ...]
    whole: bool = False  # the changes are everything there is: the follower starts from an empty index


@dataclass(slots=True)
class _Replica:
    next_sequence: int
    seen: int  # the tick in which it reported last
    status: dict[str, Any] = field(default_factory=dict)


class PrefixDirectory:
    """The state of one actor; without Ray, so that it can be tested alone.

    Memory is bounded by `max_blocks` (entries summed over replicas) and a LOG_PART-th of that in the log, of which each
    shard has its part: what does not fit is left out, which costs hits but never an answer.

    Silence is counted in ticks of `run`. While the actor stands still reports wait and nothing ticks: nobody is silent.
    """

    def __init__(self, config: DirectoryConfig) -> None:
        self._config, self._ticks = config, 0
        self._epoch = secrets.token_hex(8)  # a new one after a restart, so that followers start over
        self._index = PrefixIndex()
        self._held = 0
        self._replicas: dict[str, _Replica] = {}
        self._routers: dict[str, tuple[int, int]] = {}  # requests booked, and the tick in which it said so
        self._log: deque[Change] = deque()
        self._logged = 0  # blocks in the log, and one for each change
        self._version = 0
        self._changed = asyncio.Event()  # a new one after each change
        self.left_out = 0  # blocks that did not fit

    @property
    def nbytes(self) -> int:
        """Return the bytes of the index and, in round figures, of the log."""
        return self._index.nbytes + self._logged * KEY_BYTES + len(self._log) * _CHANGE_BYTES

    async def run(self) -> None:
        """Forget replicas and routers that are silent, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._ticks += 1
            self._forget_silent()

    async def publish(self, replica: str, batches: Sequence[BlockEvents], status: dict[str, Any] | None = None) -> bool:
        """Take a replica's reports, in order. False asks for a snapshot: a report is missing or nothing is known."""
        known = self._replicas.get(replica)
        if known is not None:
            known.seen = self._ticks
        changes = []
        for batch in batches:
            if batch.snapshot:
                known = self._replicas[replica] = _Replica(batch.sequence + 1, self._ticks)
                changes.append(self._take(replica, batch))
            elif known is None or batch.sequence != known.next_sequence:
                self._record(changes)
                return False
            else:
                known.next_sequence += 1
                changes.append(self._take(replica, batch))
        self._record(changes)
        if known is None:
            return False
        known.status = status or known.status
        return True

    async def follow(self, epoch: str, version: int, seconds: float, router: str = "", booked: int = 0) -> Update:
        """Wait for changes since `version` of `epoch`, at most `seconds`, and return them.

        A follower that is of another epoch or too far behind gets everything. A `router` tells how many requests it has
        booked, for the status.
        """
        if router:
            self._routers[router] = (booked, self._ticks)
        if epoch == self._epoch and version == self._version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        behind = self._version - version
        if epoch != self._epoch or not 0 <= behind <= len(self._log):
            return Update(self._epoch, self._version, tuple(self._everything()), whole=True)
        return Update(self._epoch, self._version, tuple(self._log[-back] for back in range(behind, 0, -1)))

    async def elsewhere(self, replica: str, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        """Return the other replicas that hold each of these blocks, without the blocks that none holds."""
        found = {key: [name for name in self._index.holders(key) if name != replica] for key in keys}
        return {key: names for key, names in found.items() if names}

    async def configure(self, config: DirectoryConfig) -> None:
        """Take new settings: the actor outlives the application that started it."""
        self._config = config

    async def status(self) -> dict[str, Any]:
        """Return the state of every replica and the size of the directory."""
        replicas = {
            name: {**known.status, "blocks": self._index.blocks_of(name)} for name, known in self._replicas.items()
        }
        return {
            "replicas": replicas,
            "routers": {name: {"booked": booked} for name, (booked, _) in self._routers.items()},
            "blocks": len(self._index),
            "bytes": self.nbytes,
            "left_out": self.left_out,
        }

    def _forget_silent(self) -> None:
        deadline = self._ticks - SILENT_TICKS
        quiet = deadline - FOLLOW_SECONDS / TICK_SECONDS
        self._routers = {name: said for name, said in self._routers.items() if said[1] >= quiet}
        for replica in [name for name, known in self._replicas.items() if known.seen < deadline]:
            del self._replicas[replica]
            self._held -= self._index.blocks_of(replica)
            self._index.drop_replica(replica)
            self._record([Change(replica, gone=True)])

    def _take(self, replica: str, batch: BlockEvents) -> Change:
        index = self._index
        before = index.blocks_of(replica)
        if batch.snapshot:
            index.drop_replica(replica)
        index.remove(replica, batch.evicted)
        self._held += index.blocks_of(replica) - before
        stored = self._fitting(replica, batch.stored)
        before = index.blocks_of(replica)
        index.add(replica, stored, batch.tier)
        self._held += index.blocks_of(replica) - before
        return Change(replica, stored, batch.evicted, batch.tier, reset=batch.snapshot, at=batch.at)

    def _fitting(self, replica: str, packed: bytes) -> bytes:
        """Return those of the keys that there is room for; what is known of the replica already needs none."""
        room = max(0, -(-self._config.max_blocks // self._config.shards) - self._held)
        if len(packed) <= room * KEY_BYTES:
            return packed
        known = self._index.holds(replica, packed)
        fits = known | ((~known).cumsum() <= room)
        self.left_out += int((~fits).sum())
        return numbers(packed)[fits].tobytes()

    def _everything(self) -> Iterator[Change]:
        """Yield the whole state in pieces."""
        for replica, tiers in self._index.contents().items():
            for tier, keys in tiers.items():
                for start in range(0, len(keys), PIECE * KEY_BYTES):
                    yield Change(replica, keys[start : start + PIECE * KEY_BYTES], tier=tier)

    def _record(self, changes: Sequence[Change]) -> None:
        if changes:
            self._log.extend(changes)
            self._logged += sum(change.size for change in changes)
            while self._logged > -(-self._config.max_blocks // (LOG_PART * self._config.shards)):
                self._logged -= self._log.popleft().size
            self._version += len(changes)
            self._changed.set()
            self._changed = asyncio.Event()


class IndexFollower:
    """Keeps what an index knows of one shard as the directory has it.

    Several followers, one for each shard, may share an index. `clock` is the wall clock.
    """

    def __init__(self, index: PrefixIndex, shard: Shard, clock: Callable[[], float]) -> None:
        self._index, self._shard, self._clock = index, shard, clock
        self.epoch, self.version = "", 0

    async def apply(self, update: Update) -> float | None:
        """Take the changes in, piece by piece, with room for others in between.

        Returns the staleness that the index had: seconds since the oldest of the changes happened in its replica, by
        the two machines' wall clocks; None where nothing happened.
        """
        if update.whole:
            self._index.drop_shard(self._shard)
        for change in update.changes:
            self._apply(change)
            await asyncio.sleep(0)
        self.epoch, self.version = update.epoch, update.version
        happened = [change.at for change in update.changes if change.at is not None]
        return max(0.0, self._clock() - min(happened)) if happened else None

    def _apply(self, change: Change) -> None:
        if change.reset or change.gone:
            if self._shard.of == 1:
                self._index.drop_replica(change.replica)
            else:
                self._index.remove(change.replica, self._shard.part(self._index.keys_of(change.replica)))
        self._index.remove(change.replica, change.evicted)
        if change.stored:
            self._index.add(change.replica, change.stored, change.tier)


class DirectoryActor(PrefixDirectory):
    """The directory as Ray runs it, with metrics."""

    def __init__(self, config: DirectoryConfig, application: str, shard: Shard) -> None:
        super().__init__(config)
        self._shard = str(shard.number)
        self._running: asyncio.Task[None] | None = None
        self._recorder = recorders.RayRecorder(*telemetry.DIRECTORY, application=application)

    async def publish(self, replica: str, batches: Sequence[BlockEvents], status: dict[str, Any] | None = None) -> bool:
        if self._running is None:  # the first call in the actor's event loop
            self._running = asyncio.create_task(self.run())
        followed = await super().publish(replica, batches, status)
        self._recorder.set(telemetry.DIRECTORY_BYTES, self.nbytes, shard=self._shard)
        self._recorder.set(telemetry.DIRECTORY_BLOCKS, len(self._index), shard=self._shard)
        self._recorder.set(telemetry.DIRECTORY_LEFT_OUT, self.left_out, shard=self._shard)
        return followed


def directory_name(application: str, shard: int = 0) -> str:
    return f"{application}-prefix-directory" + (f"-{shard}" if shard else "")


def start_directory(application: str, config: DirectoryConfig) -> list[Any]:
    """Start the application's directory actors, one a shard: named, detached, restarted when they die.

    Those that run already go on; those of an earlier, larger number of shards end.
    """
    import ray

    def start(number: int) -> Any:
        shard = Shard(number, config.shards)
        return named_actors.start(
            directory_name(application, number), DirectoryActor, config, application, shard, keep=True
        )

    actors = [start(number) for number in range(config.shards)]
    for actor in actors:
        actor.configure.remote(config)
    with contextlib.suppress(ValueError):  # there is none of that name
        for number in itertools.count(config.shards):
            ray.kill(ray.get_actor(directory_name(application, number), namespace=named_actors.NAMESPACE))
    return actors


def merged(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the status of all shards into that of one directory."""
    names = dict.fromkeys(name for shard in shards for name in shard["replicas"])
    replicas = {}
    for name in names:
        known = [shard["replicas"][name] for shard in shards if name in shard["replicas"]]
        replicas[name] = {**known[0], "blocks": sum(each["blocks"] for each in known)}
    routers = {name: said for shard in shards for name, said in shard["routers"].items()}
    return {"replicas": replicas, "routers": routers} | {
        key: sum(shard[key] for shard in shards) for key in ("blocks", "bytes", "left_out")
    }


async def status_of(shards: Sequence[Any]) -> dict[str, Any]:
    """Ask the actors of all shards for their status, and merge it. Raises ActorAwayError where one does not answer."""
    from ray.exceptions import RayActorError

    try:
        return merged(await asyncio.gather(*(shard.status.remote() for shard in shards)))
    except RayActorError as error:
        why = "the prefix directory does not answer: it is being started anew, or is no more"
        raise named_actors.ActorAwayError(why) from error

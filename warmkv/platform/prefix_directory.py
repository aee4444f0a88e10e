"""The authority on which replica holds which block, fed by the replicas' events and followed by the routers.

Events come in batches with sequence numbers. A gap, or an actor that has restarted empty, is healed by asking the
replica for a snapshot. Routers keep a copy of the index and follow the changes, so a routing decision calls nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from warmkv.config import DirectoryConfig
from warmkv.prefixes.index import PrefixIndex
from warmkv.replicas.protocol import BlockEvents

NAMESPACE = "warmkv"


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to one replica's blocks; `reset` forgets what it held before."""

    replica: str
    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    reset: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """Answer to a follower: the changes that lead from its version to `version`."""

    epoch: str
    version: int
    changes: tuple[Change, ...]
    whole: bool = False  # the changes are everything there is: the follower starts from an empty index


def apply_change(index: PrefixIndex, change: Change) -> None:
    """Bring a copy of the index up to date."""
    if change.reset or change.gone:
        index.drop_replica(change.replica)
    if not change.gone:
        index.remove(change.replica, change.evicted)
        index.add(change.replica, change.stored)


@dataclass(slots=True)
class _Replica:
    next_sequence: int
    seen: float
    status: dict[str, Any] = field(default_factory=dict)


class PrefixDirectory:
    """The state of the actor; without Ray, so that it can be tested alone.

    Memory is bounded by `max_blocks` (entries summed over replicas) and `log_events`: what does not fit is left out,
    which costs hits but never an answer.
    """

    def __init__(self, config: DirectoryConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._epoch = secrets.token_hex(8)  # a new one after a restart, so that followers start over
        self._index = PrefixIndex()
        self._held = 0
        self._replicas: dict[str, _Replica] = {}
        self._log: deque[Change] = deque(maxlen=config.log_events)
        self._version = 0
        self._changed = asyncio.Event()  # a new one after each change
        self.left_out = 0  # blocks that did not fit

    async def publish(self, replica: str, batches: Sequence[BlockEvents], status: dict[str, Any] | None = None) -> bool:
        """Take a replica's reports, in order. False asks for a snapshot: a report is missing or nothing is known."""
        self._forget_silent()
        known = self._replicas.get(replica)
        changes = []
        for batch in batches:
            if batch.snapshot:
                known = self._replicas[replica] = _Replica(batch.sequence + 1, self._clock())
                changes.append(self._take(replica, batch, reset=True))
            elif known is None or batch.sequence != known.next_sequence:
                self._record(changes)
                return False
            else:
                known.next_sequence += 1
                changes.append(self._take(replica, batch, reset=False))
        self._record(changes)
        if known is None:
            return False
        known.seen = self._clock()
        known.status = status or known.status
        return True

    async def follow(self, epoch: str, version: int, seconds: float) -> Update:
        """Changes since `version` of `epoch`, as soon as there are any or after `seconds`.

        A follower that is of another epoch or too far behind gets everything.
        """
        if epoch == self._epoch and version == self._version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        behind = self._version - version
        if epoch != self._epoch or not 0 <= behind <= len(self._log):
            everything = tuple(
                Change(name, stored=tuple(self._index.keys_of(name)), reset=True) for name in self._replicas
            )
            return Update(self._epoch, self._version, everything, whole=True)
        return Update(self._epoch, self._version, tuple(self._log[-back] for back in range(behind, 0, -1)))

    async def configure(self, config: DirectoryConfig) -> None:
        """Take new settings: the actor outlives the application that started it."""
        self._config = config
        self._log = deque(self._log, maxlen=config.log_events)

    async def status(self) -> dict[str, Any]:
        """What is known of every replica, and the size of the directory."""
        self._forget_silent()
        replicas = {
            name: {**known.status, "blocks": self._index.blocks_of(name)} for name, known in self._replicas.items()
        }
        return {"replicas": replicas, "blocks": len(self._index), "version": self._version, "left_out": self.left_out}

    def _forget_silent(self) -> None:
        deadline = self._clock() - self._config.silence_seconds
        for replica in [name for name, known in self._replicas.items() if known.seen < deadline]:
            del self._replicas[replica]
            self._held -= self._index.blocks_of(replica)
            self._index.drop_replica(replica)
            self._record([Change(replica, gone=True)])

    def _take(self, replica: str, batch: BlockEvents, reset: bool) -> Change:
        if reset:
            self._held -= self._index.blocks_of(replica)
            self._index.drop_replica(replica)
        before = self._index.blocks_of(replica)
        self._index.remove(replica, batch.evicted)
        room = self._config.max_blocks - self._held + (before - self._index.blocks_of(replica))
        stored = batch.stored[: max(0, room)]
        self.left_out += len(batch.stored) - len(stored)
        self._index.add(replica, stored)
        self._held += self._index.blocks_of(replica) - before
        return Change(replica, stored, batch.evicted, reset)

    def _record(self, changes: Sequence[Change]) -> None:
        if changes:
            self._log.extend(changes)
            self._version += len(changes)
            self._changed.set()
            self._changed = asyncio.Event()


def directory_name(application: str) -> str:
    return f"{application}-prefix-directory"


def start_directory(application: str, config: DirectoryConfig) -> Any:
    """The application's directory actor, started if there is none: named, detached, restarted when it dies."""
    import ray

    actor = (
        ray.remote(PrefixDirectory)
        .options(
            name=directory_name(application),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=1000,
        )
        .remote(config)
    )
    actor.configure.remote(config)
    return actor

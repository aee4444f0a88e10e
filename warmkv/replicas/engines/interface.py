"""What a replica needs of an engine. Everything above it (gateway, router, directory, metrics) knows no more of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from llguidance import LLMatcher

from warmkv import recorders
from warmkv.policies.contents import Contents
from warmkv.policies.transfer import TransferTerms
from warmkv.prefixes.roots import Roots
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.engine.scheduler import Emit
from warmkv.replicas.engine.stats import EngineStats
from warmkv.replicas.protocol import BlocksWanted, GenerateRequest, Started
from warmkv.replicas.transfer import Ask, BlockPayloads, BlocksOffered


class StoredPrefixes(Protocol):
    """The full blocks that an engine holds, and what metrics tell of them."""

    @property
    def tier_limits(self) -> Mapping[str, int]: ...
    @property
    def left(self) -> Mapping[tuple[str, str], int]: ...
    @property
    def lost(self) -> Mapping[str, int]: ...
    @property
    def residency(self) -> Any: ...

    def full_blocks(self) -> Mapping[str, Sequence[bytes]]:
        """Return keys of the full blocks by the fastest tier that has them. To be called by `Engine.call`."""
        ...


class Engine(Protocol):
    """An engine that computes requests until `stop`. `submit`, `cancel` and `call` may be used from any thread."""

    flush: Callable[[], None]
    """Called behind events that were emitted; set by who listens."""

    @property
    def turns(self) -> int:
        """Return a number that grows while the engine goes on."""
        ...

    @property
    def store(self) -> StoredPrefixes: ...

    def start(self) -> None:
        """Begin to compute what is submitted. For the thread of the event loop."""
        ...

    def submit(self, request: GenerateRequest, emit: Emit, matcher: LLMatcher | None = None) -> None:
        """Queue a request; `emit` is called with Started, drawn tokens, and an end. Raises EngineError."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; nothing happens if it has ended already."""
        ...

    def call(self, action: Callable[[], None]) -> None:
        """Run an action in the order of the events that are published; not at all if the engine has ended."""
        ...

    def check_turning(self, limit: float) -> None:
        """Raise RuntimeError where the engine has ended, or has been in one step for more than `limit` seconds."""
        ...

    def drop_prefixes(self, tenant: str) -> Future[int]:
        """Forget what is stored of a tenant; the result is the bytes freed."""
        ...

    def contents(self, most: int) -> Future[Contents]:
        """Look up at most `most` of the stored blocks, with their lives."""
        ...

    def stats(self) -> EngineStats:
        """Return the numbers as of the last step."""
        ...

    def stop(self, spill_seconds: float = 0.0) -> None:
        """End the engine; what is in flight fails. For any thread but the event loop's: it may block for seconds.

        What only memory holds is written to the disk tier, if the engine has one, for so many seconds at most.
        """
        ...


class Fetching(Protocol):
    """Fetch a request's warm prefix from another replica."""

    def helps(self, request: GenerateRequest) -> bool: ...
    async def prepare(self, request: GenerateRequest) -> None: ...
    def started(self, request: GenerateRequest, started: Started) -> None: ...


class Moving(Fetching, Protocol):
    """Fetch blocks from other replicas, and lend and hand over to them (`transfer.Transfers`)."""

    async def lend(self, wanted: BlocksWanted) -> BlockPayloads: ...
    async def take_over(self, offered: BlocksOffered) -> int: ...
    async def hand_over(
        self,
        peers: Sequence[str],
        holders: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, Sequence[str]]]],
        offer: Callable[[BlocksOffered], Awaitable[int]],
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Place an engine in the replica of that name, with so many threads and a share of the device's memory.

    `roots` are those of the requests it will get; None: unknown.
    """

    replica: str
    threads: int
    share: float
    roots: Roots | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """An engine that is ready to start, and what a replica puts around it."""

    engine: Engine
    memory: Mapping[str, Any]  # its plan
    compiler: Compiler | None  # of constraints; None for an engine that has its own
    moving: Callable[[TransferTerms, Ask, recorders.Recorder], Moving]

"""One real vLLM for the session, with a small cache, in an event loop of its own: `make test-vllm`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests.polling import PATIENCE
from warmkv.config import Config, parse
from warmkv.prefixes import breakpoints, hashing
from warmkv.prefixes.breakpoints import Breakpoint
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.engines import build_engine
from warmkv.replicas.engines.interface import Place
from warmkv.replicas.loading.tokenizer import decoder, load_tokenizer
from warmkv.replicas.protocol import Delta, Event, Failed, Finished, GenerateRequest, SamplingParams, Started

T = TypeVar("T")
BLOCK = 32
BLOCKS = 40
"""Of vLLM's cache: a few prompts fill it."""

KEPT_WARM = 8
"""Of these, blocks before marks that are touched."""

TOKEN_BYTES = 6 * 2 * 32 * 2 * 4
ROOTS = [hashing.chain_root(name, "model") for name in (b"a", b"b", b"c")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what ends the engine come last."""
    items.sort(key=lambda item: "killed" in item.name)


async def true(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds. Raises TimeoutError after `PATIENCE` seconds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - another process gets there
            await asyncio.sleep(0.01)


class Replica:
    """A vLLM engine with what a replica puts around it, but without Ray; and what the directory is told."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.directory: dict[bytes, str] = {}
        self.tokenizer = load_tokenizer(config.model)
        self.numbers = iter(range(1 << 30))
        self.run(self._start())

    async def _start(self) -> None:
        place = Place("replica", threads=1, share=1.0)
        self.parts = build_engine(self.config, self.tokenizer, place, self._publish, lambda what: None)
        self.engine: Any = self.parts.engine
        self.outputs = OutputProcessor(self.engine, decoder(self.tokenizer), 1e9)
        self.engine.start()

    def _publish(self, stored: Sequence[bytes], evicted: Sequence[bytes], tier: str) -> None:
        for key in evicted:
            del self.directory[key]
        self.directory |= dict.fromkeys(stored, tier)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def request(
        self, tokens: Sequence[int], new: int = 8, marks: dict[int, str] | None = None, root: int = 0, **sampling: Any
    ) -> GenerateRequest:
        """Return a request as the gateway makes it; marks are at positions, each the end of a content block."""
        marked = [Breakpoint(at, ttl) for at, ttl in sorted((marks or {}).items())]
        ends = [mark.position for mark in marked]
        plan = breakpoints.plan(tokens, ends, marked, ROOTS[root], block_size=BLOCK)
        parameters = SamplingParams(new, **{"temperature": 0.0, **sampling})
        number = next(self.numbers)
        return GenerateRequest(
            f"r{number}",
            tuple(tokens),
            plan.hashes,
            parameters,
            self.config.compression.policy,
            plan.marks,
            plan.reads,
            root=ROOTS[root],
            tenant=str(root),
        )

    async def events(self, request: GenerateRequest) -> list[Event]:
        """Answer a request; return all that is told of it."""
        told: list[Event] = []
        output = self.outputs.submit(request, told.append)
        try:
            await asyncio.wait([output.ended])
        finally:
            self.outputs.cancel(output)
        return told

    def answer(self, request: GenerateRequest) -> list[Event]:
        return self.run(self.events(request))

    async def heard(self) -> None:
        """Wait until every event that vLLM has sent is known: those of a marker's own blocks come last."""
        marker = self.request([next(self.numbers) % 200 + 5, *range(5, 5 + BLOCK)], 1, root=2)
        await self.events(marker)
        await true(lambda: marker.hashes[0] in self.directory)

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.to_thread(self.engine.stop)

        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


def started_replica(storage: str = "model", policy: str = "full") -> Replica:
    """Start a vLLM with a cache of 40 blocks of the model's dtype, whatever its format is."""
    kv = BLOCKS * BLOCK * TOKEN_BYTES
    config = parse(
        {
            "engine": {"kind": "vllm", "max_context": 512, "kv_bytes": kv // 2, "max_slots": 4},
            "prefix_cache": {
                "memory_bytes": kv // 2,
                "block_size": BLOCK,
                "storage": storage,
                "keep_warm": KEPT_WARM * BLOCK * TOKEN_BYTES,
            },
            "compression": {"policy": policy},
        }
    )
    return Replica(config)


@pytest.fixture(scope="session")
def replica() -> Iterator[Replica]:
    replica = started_replica()
    yield replica
    replica.close()


def tokens_of(told: Sequence[Event]) -> list[int]:
    return [token for event in told if isinstance(event, Delta) for token in event.tokens]


def text_of(told: Sequence[Event]) -> str:
    return "".join(event.text for event in told if isinstance(event, Delta))


def started(told: Sequence[Event]) -> Started:
    (found,) = [event for event in told if isinstance(event, Started)]
    return found


def end(told: Sequence[Event]) -> Finished | Failed:
    found = told[-1]
    assert isinstance(found, Finished | Failed)
    return found


def with_resume(request: GenerateRequest, tokens: Sequence[int]) -> GenerateRequest:
    """Return a request that goes on behind tokens which another replica drew."""
    return replace(request, resume=tuple(tokens))

"""The gateway over real HTTP with a real engine in one process: everything but Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import uvicorn

from tests import clocks
from tests.clients import anthropic_client, openai_client
from tests.engine_stream import stream
from tests.polling import PATIENCE, until
from warmkv import telemetry
from warmkv.config import Config, load
from warmkv.platform.control import Control
from warmkv.platform.gateway.endpoints import create_app
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.gateway.service import Service
from warmkv.platform.live_config_store import FolderStore
from warmkv.platform.local import free_port
from warmkv.platform.operator_key import with_operator
from warmkv.platform.whatif.kept import Memory
from warmkv.platform.whatif.replays import Basis, Replayed, Round, replays
from warmkv.platform.whatif.service import WhatIf
from warmkv.platform.whatif.sizes import Held
from warmkv.policies.contents import Contents
from warmkv.prefixes.record import RequestRecord
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.loading.load import load_model
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.replicas.protocol import Event, GenerateRequest


@dataclass
class Counted:
    """Collects what the service records."""

    seen: list[tuple[str, float, dict[str, str]]] = field(default_factory=list)

    def add(self, counter: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(counter.labels)
        self.seen.append((counter.name, value, labels))

    def set(self, gauge: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(gauge.labels)
        self.seen.append((gauge.name, value, labels))

    def forget(self, gauge: telemetry.Metric, **labels: str) -> None:
        assert set(labels) <= set(gauge.labels)

    def observe(self, histogram: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(histogram.labels)
        self.seen.append((histogram.name, value, labels))


class Replaying(WhatIf):
    """The what-if service in this process: it replays when it is asked for its table, if there is something new."""

    def __init__(
        self, config: Config, control: Control, records: Sequence[RequestRecord], folder: Path, engine: Engine
    ) -> None:
        async def replay(work: Round) -> AsyncGenerator[Basis | Replayed]:
            for step in replays(work):
                yield step

        async def held() -> Held:
            return Held(1)

        async def contents(most: int) -> list[Contents]:
            return [await asyncio.wrap_future(engine.between_steps(lambda: engine.store.contents(most)))]

        assert config.control.whatif is not None
        memory = Memory(FolderStore(folder), "warmkv", 0.0)
        clocks: Any = {"clock": time.monotonic, "wall_clock": time.time}
        asked = control.history, held, contents
        super().__init__(config, config.control.whatif, replay, *asked, Counted(), memory, **clocks)
        self._all = records

    async def table(self) -> dict[str, Any]:
        await self.take("only", self._all[self.window.seen :], 0)
        await self.turn()
        return await super().table()


OPERATOR = {"x-api-key": "operator"}  # headers


class Server:
    """A gateway and one engine, listening on a free port."""

    def __init__(self, config: Config, clock: Callable[[], float], folder: Path) -> None:
        self.config, self.records, self.metrics = config, [], Counted()
        self.records: list[RequestRecord] = []
        self.requests: list[GenerateRequest] = []
        self.attempts: list[Attempt] = []
        self.dropped: list[str] = []
        self.faults: list[int] = []  # events after which the next attempts lose their replica
        tokenizer = load_tokenizer(config.model)
        self.engine = Engine(load_model(config.model), config.engine, config.prefix_cache, clock=clock, name="only")

        async def send(attempt: Attempt) -> AsyncGenerator[Event]:
            self.attempts.append(attempt)
            self.requests.append(attempt.request)
            left = self.faults.pop(0) if self.faults else -1
            async for event in stream(self.engine, attempt.request, tokenizer.backend_tokenizer):
                if left == 0:
                    raise ConnectionError("the replica has died")
                left -= 1
                yield event

        async def status() -> dict[str, Any]:
            return {
                "replicas": {
                    "only": {**dataclasses.asdict(self.engine.stats()), "memory": self.engine.memory.to_json()}
                }
            }

        service = Service(
            config, send, self.metrics, write_log=self.records.append, clock=time.monotonic, wall_clock=time.time
        )

        async def drop(tenant: str, root: bytes) -> list[int]:
            self.dropped.append(tenant)
            return [5, 7]

        self.control = control = Control(FolderStore(folder), "warmkv")
        whatif = None
        if config.control.whatif is not None:
            whatif = Replaying(config, control, self.records, folder, self.engine)
        self.taking = 1  # replicas that take requests
        app = create_app(
            service,
            tokenizer,
            secret=b"secret",
            max_context=self.engine.max_context,
            status=status,
            drop=drop,
            started_at=time.time(),
            control=control,
            name="only",
            taking=lambda: self.taking,
            whatif=whatif,
        )
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self.loop = clocks.SkippingLoop()
        self._server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        self._threads = [
            threading.Thread(target=self.engine.run, daemon=True),
            threading.Thread(target=lambda: clocks.run(self._server.serve(), lambda: self.loop), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        until(lambda: self._server.started, "the gateway listens")

    def stop(self) -> None:
        self._server.should_exit = True
        self.engine.stop()
        for thread in self._threads:
            thread.join(PATIENCE)

    def skip(self, seconds: float) -> None:
        """Let time pass for the gateway's time-outs."""
        self.loop.call_soon_threadsafe(self.loop.skip, seconds)

    @contextmanager
    def standing_still(self, tokens: int = 0) -> Iterator[None]:
        """Stop the engine's thread meanwhile: now, or when it has drawn so many tokens of a request that comes now."""
        gate = threading.Event()
        submit = self.engine.submit

        def submit_and_stop(request: GenerateRequest, emit: Callable[[Any], None], matcher: Any = None) -> None:
            drawn = itertools.count(1)

            def emit_and_stop(event: Any) -> None:
                emit(event)
                if isinstance(event, int) and next(drawn) == tokens:
                    gate.wait()

            submit(request, emit_and_stop, matcher)

        if tokens:
            self.engine.submit = submit_and_stop  # type: ignore[method-assign]
        else:
            self.engine.call(gate.wait)
        try:
            yield
        finally:
            self.engine.submit = submit  # type: ignore[method-assign]
            gate.set()

    def anthropic(self, key: str = "alice") -> anthropic.Anthropic:
        return anthropic_client(self.url, key)

    def openai(self, key: str = "alice") -> openai.OpenAI:
        return openai_client(self.url, key)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start servers with some settings; all are stopped at the end of the module."""
    servers: list[Server] = []

    def start(*flags: str, clock: Callable[[], float] = time.monotonic) -> Server:
        config = load(flags=flags)
        config = config.model_copy(update={"gateway": with_operator(config.gateway, OPERATOR["x-api-key"])})
        servers.append(Server(config, clock, tmp_path_factory.mktemp("policy")))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve("engine.threads=1")

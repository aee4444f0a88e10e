"""The gateway's ASGI application in this event loop, before a replica that does what a test says. No sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from fastapi import Request

from tests.polling import PATIENCE
from warmkv.config import Config, LimitsConfig, load
from warmkv.platform.control import Control
from warmkv.platform.gateway.access.limits import TenantLimiter
from warmkv.platform.gateway.endpoints import create_app
from warmkv.platform.gateway.intake.body import Intake
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.gateway.service import Arrival, Service
from warmkv.platform.live_config_store import FolderStore
from warmkv.platform.tenants import Tenant
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.replicas.protocol import Admitted, Delta, Event, Finished, Started
from warmkv.request_context import RequestContext

STARTED = Started("only", 0, 0, 0, 4, 100, 0.0, 0.0)


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop turn until a condition holds. Raises TimeoutError after `PATIENCE` seconds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - nothing tells when threads and queues get there
            await asyncio.sleep(0)


class Recorded:
    """Collects what the service counts."""

    def __init__(self) -> None:
        self.added: list[tuple[str, dict[str, str]]] = []

    def add(self, counter: Any, value: float, **labels: str) -> None:
        self.added.append((counter.name, labels))

    def set(self, gauge: Any, value: float, **labels: str) -> None: ...

    def forget(self, gauge: Any, **labels: str) -> None: ...
    def observe(self, histogram: Any, value: float, **labels: str) -> None: ...


def arrival(service: Service, tenant: Tenant | None = None) -> Arrival:
    """Return a request of a tenant that has just come in."""
    limiter = TenantLimiter(service.config, service.clock, service.wall_clock)
    lease = limiter.begin(Request({"type": "http"}), tenant or Tenant("a", b"salt", frozenset(), LimitsConfig()))
    return service.arrive(RequestContext("req_1"), lease)


class Gateway:
    """An application over a fake replica: `answer` makes the events of an attempt."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        clock: Callable[[], float] = time.monotonic,
        others: list[Gateway] | None = None,
    ) -> None:
        self.config: Config = load(flags=flags)
        self.others = [] if others is None else others  # gateways of the same service
        self.recorded, self.records = Recorded(), []
        self.admitted = 0
        self.first_token = asyncio.Event()  # before it the replica says nothing
        self.first_token.set()
        self.fault: Exception | None = None  # raised in place of the admission
        self.service = Service(
            self.config, self.answer, self.recorded, write_log=self.records.append, clock=clock, wall_clock=time.time
        )
        self.tokenizer = load_tokenizer(self.config.model)
        self.app = create_app(
            self.service,
            self.tokenizer,
            secret=b"secret",
            max_context=4096,
            status=self._nothing,
            drop=self._nothing,
            started_at=0.0,
            control=Control(FolderStore(folder), "warmkv"),
            name="only",
            taking=lambda: 1,
            others=None if others is None else self,
        )
        self.intake: Intake = self.app.state.intake

    async def answer(self, attempt: Attempt) -> AsyncGenerator[Event]:
        if self.fault is not None:
            raise self.fault
        self.admitted += 1
        yield Admitted()
        await self.first_token.wait()
        yield STARTED
        yield Delta("hello", 1, (7,))
        yield Finished("length", 1)

    async def responses(self, tenant: bytes, name: str) -> list[Any]:
        """Return what every gateway has of a response, as they are asked by the handle of their deployment."""
        return [gateway.app.state.responses.chain(tenant, name) for gateway in self.others]

    async def delete_response(self, tenant: bytes, name: str) -> bool:
        others = (gateway for gateway in self.others if gateway is not self)
        return sum(gateway.app.state.responses.delete(tenant, name) for gateway in others) > 0

    async def _nothing(self, *_: Any) -> Any:
        return {"replicas": {}}

    def statuses(self) -> list[str]:
        """Return the count of the requests that have ended, as they were counted."""
        return [labels["status"] for name, labels in self.recorded.added if name == "warmkv_requests"]


class Exchange:
    """One request: its body may come in pieces, its client may leave."""

    def __init__(
        self,
        gateway: Gateway,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> None:
        self.status, self.headers, self.body = 0, {}, b""
        self.pieces: list[bytes] = []  # of the body, as they were written
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.changed = asyncio.Event()
        self.discards = False  # what it is sent
        self.reads = asyncio.Event()  # while it is not set, sending waits
        self.reads.set()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.ensure_future(gateway.app(scope, self._incoming.get, self._sent))
        if body is not None:
            self.send(body if isinstance(body, bytes) else json.dumps(body).encode())

    def send(self, piece: bytes, *, last: bool = True) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": piece, "more_body": not last})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait until something holds of what was answered so far."""
        while not true():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENCE)

    async def whole(self) -> Exchange:
        await asyncio.wait_for(self.task, PATIENCE)
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message of a refusal."""
        return str(self.json["error"]["message"])

    async def _sent(self, message: Any) -> None:
        if not self.reads.is_set():
            await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif not self.discards:
            self.pieces.append(message.get("body", b""))
            self.body += self.pieces[-1]
        self.changed.set()


def message(gateway: Gateway, content: Any = "hello", **more: Any) -> dict[str, Any]:
    """Return a body of /v1/messages."""
    said = [{"role": "user", "content": content}]
    return {"model": gateway.config.model.name, "max_tokens": 4, "messages": said, **more}


def chat(gateway: Gateway, **more: Any) -> dict[str, Any]:
    """Return a body of /v1/chat/completions."""
    return {"model": gateway.config.model.name, "messages": [{"role": "user", "content": "hello"}], **more}

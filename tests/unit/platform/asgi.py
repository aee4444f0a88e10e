"""The gateway's application called without a server, over a replica that answers as the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.platform.conftest import Counted
from warmkv.config import load
from warmkv.platform.control import Control
from warmkv.platform.gateway.access.audit import OperatorAction
from warmkv.platform.gateway.endpoints import ReplicaStatus, create_app
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.gateway.service import Service
from warmkv.platform.gateway.whatif import WhatIfControl
from warmkv.platform.live_config_store import FolderStore
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.replicas.protocol import Delta, Event, Finished, Started

SECRET = b"secret"
DAY = 1_800_000_000.0  # Unix time at which the clocks stand


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: Any  # JSON, or the text of what is none

    @property
    def error(self) -> str:
        return f"{self.body['error']['type']}: {self.body['error']['message']}"


class Gateway:
    """An application whose clock is `now`; its replica draws `output_tokens`, after `gate` is open."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        whatif: WhatIfControl | None = None,
        status: ReplicaStatus | None = None,
    ) -> None:
        config = load(flags=flags, environ={})
        self.now, self.output_tokens, self.cached_tokens = 0.0, 3, 0
        self.written = 0  # position up to which the replica says that it has written
        self.gate: asyncio.Event | None = None
        self.asked = 0  # requests that reached the replica
        self.leaves = False  # whether the client goes as soon as its answer begins
        self.dropped: list[str] = []
        self.others: list[Gateway] = []  # of the same service
        self.actions: list[OperatorAction] = []  # the lines of the audit log
        self.metrics = Counted()
        self.model = config.model.name

        async def send(attempt: Attempt) -> AsyncGenerator[Event]:
            self.asked += 1
            if self.gate is not None:
                await self.gate.wait()
            tiers = {"device": self.cached_tokens}
            yield Started("only", 0, self.written, self.cached_tokens, 1, 1, 0.0, 0.0, tiers)
            yield Delta("text", self.output_tokens)
            yield Finished("end", self.output_tokens)

        async def no_replicas() -> dict[str, Any]:
            return {"replicas": {}}

        async def drop(tenant: str, root: bytes) -> list[int]:
            self.dropped.append(tenant)
            for gateway in (self, *self.others):
                gateway.app.state.forget(root)
            return [0]

        service = Service(
            config,
            send,
            self.metrics,
            write_log=lambda record: None,
            clock=lambda: self.now,
            wall_clock=lambda: DAY + self.now,
        )
        control = Control(FolderStore(folder), "warmkv")
        tokenizer = load_tokenizer(config.model)
        self.app = create_app(
            service,
            tokenizer,
            secret=SECRET,
            max_context=4096,
            status=status or no_replicas,
            drop=drop,
            started_at=DAY,
            control=control,
            name="this gateway",
            taking=lambda: 1,
            whatif=whatif,
            keep_action=self.actions.append,
        )

    def call(self, method: str, path: str, key: str | None = None, body: Any = None, **headers: str) -> Reply:
        """Return the answer to a request; `if_match` is the header If-Match."""
        return asyncio.run(self.request(method, path, key, body, **headers))

    async def request(self, method: str, path: str, key: str | None = None, body: Any = None, **headers: str) -> Reply:
        named = {**headers, **({} if key is None else {"x_api_key": key})}
        sent: list[Any] = []
        received = iter([{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}])

        async def receive() -> Any:
            return next(received, None) or await asyncio.Event().wait()  # the client stays

        async def send(message: Any) -> None:
            if self.leaves:
                raise OSError("the connection is closed")
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self.app(scope, receive, send)
        start, *parts = sent
        told = {name.decode(): value.decode() for name, value in start["headers"]}
        text = b"".join(part.get("body", b"") for part in parts).decode()
        is_json = text and "json" in told["content-type"]
        return Reply(start["status"], told, json.loads(text) if is_json else text)

    def messages(self, key: str | None = None, **more: Any) -> Reply:
        """Return the answer to a short message."""
        return asyncio.run(self.message(key, **more))

    async def message(self, key: str | None = None, **more: Any) -> Reply:
        body = {"model": self.model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}], **more}
        return await self.request("POST", "/v1/messages", key, body)

    def completion(self, key: str | None = None, **more: Any) -> Reply:
        """Return the answer to a short completion."""
        body = {"model": self.model, "max_tokens": 8, "prompt": "Hello", **more}
        return self.call("POST", "/v1/completions", key, body)


async def becomes(condition: Callable[[], bool | Awaitable[bool]], each: Callable[[], None] = lambda: None) -> None:
    """Wait until the condition holds; `each` is called between two looks."""
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        each()
        await asyncio.sleep(0.001)


def as_flag(setting: str, value: Sequence[Any] | dict[str, Any]) -> str:
    """Return a setting as it is written on the command line."""
    return f"{setting}={json.dumps(value)}"

"""However a request ends, and whenever its client leaves: nothing of it is held afterwards, and it is counted once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from tests.polling import PATIENCE
from tests.unit.platform.exchanges import STARTED, Exchange, Gateway, chat, message, until
from warmkv.platform.gateway.access.limits import TenantLimiter
from warmkv.platform.gateway.resume import Attempt
from warmkv.replicas.protocol import Admitted, Delta, Event

APIS = ["/v1/messages", "/v1/chat/completions", "/v1/completions"]
LIMITED = ("gateway.limits.concurrent_requests=5", "gateway.limits.tokens_per_minute=1000000")
STAGES = 24  # turns of the loop in which a request gets from its first byte to its last


def body_of(path: str, gateway: Gateway, *, stream: bool) -> dict[str, Any]:
    if path == "/v1/messages":
        marked = [{"type": "text", "text": "hello " * 1100, "cache_control": {"type": "ephemeral"}}]
        return message(gateway, marked, stream=stream)
    if path == "/v1/completions":
        return {"model": gateway.config.model.name, "prompt": "hello", "stream": stream}
    return chat(gateway, stream=stream)


def held(gateway: Gateway, limits: TenantLimiter) -> dict[str, int]:
    """What a gateway holds for requests that are open."""
    accounts = limits._limiter._accounts.values()
    return {
        "body bytes": gateway.intake._budget.used,
        "in the intake": gateway.intake._small.backlog.waiting + gateway.intake._large.backlog.waiting,
        "waiting": gateway.service.backlog.waiting,
        "writers": len(gateway.service._writers),
        "leases": sum(account.running + account.waiting for account in accounts),
    }


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[TenantLimiter]:
    """Return the limits of gateways, as they are made."""
    made: list[TenantLimiter] = []
    begin = TenantLimiter.__init__

    def noted(self: TenantLimiter, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(TenantLimiter, "__init__", noted)
    return made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", APIS)
def test_a_whole_answer_leaves_nothing(tmp_path, limits, path, stream):
    async def run() -> None:
        gateway = Gateway(tmp_path, *LIMITED)
        for _ in range(2):
            assert (await Exchange(gateway, path, body_of(path, gateway, stream=stream)).whole()).status == 200
        assert not any(held(gateway, limits[0]).values()), held(gateway, limits[0])
        assert gateway.statuses() == ["ok"] * 2

    asyncio.run(run())


@pytest.mark.parametrize("cut", [True, False], ids=["cancelled", "disconnected"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", APIS)
def test_a_client_that_leaves_at_any_stage_leaves_nothing(tmp_path, limits, path, stream, cut):
    """Serve cancels the request of a client that leaves; the server tells the application as well."""

    async def run() -> None:
        gateway = Gateway(tmp_path, *LIMITED)
        data = json.dumps(body_of(path, gateway, stream=stream)).encode()
        for turns in range(STAGES):
            gateway.first_token.clear()
            exchange, before = Exchange(gateway, path), gateway.admitted
            exchange.send(data[:9], last=False)
            for turn in range(turns):
                if turn == 2:
                    exchange.send(data[9:])
                if turn == 8:  # until then it is parsed, as far as the threads of the intake get
                    await until(lambda before=before: gateway.admitted > before)
                await asyncio.sleep(0)
            _ = exchange.task.cancel() if cut else exchange.leave()
            gateway.first_token.set()
            with contextlib.suppress(asyncio.CancelledError, ClientDisconnect):
                await asyncio.wait_for(exchange.task, PATIENCE)
            await until(lambda: not any(held(gateway, limits[0]).values()))
        assert len(gateway.records) == len(gateway.statuses())
        assert len({record.id for record in gateway.records}) == len(gateway.records)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", APIS)
def test_an_answer_that_is_cancelled_half_way_is_written_down(tmp_path, path, stream):
    async def run() -> None:
        gateway, begun = Gateway(tmp_path), asyncio.Event()

        async def answer(attempt: Attempt) -> AsyncGenerator[Event]:
            for event in (Admitted(), STARTED, Delta("hello", 1, (7,))):
                yield event
            begun.set()
            await asyncio.Event().wait()

        gateway.service._send = answer
        exchange = Exchange(gateway, path, body_of(path, gateway, stream=stream))
        await begun.wait()
        exchange.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await exchange.task
        assert gateway.statuses() == ["cancelled"]
        assert [(record.status, record.usage.output) for record in gateway.records] == [("cancelled", 1)]

    asyncio.run(run())

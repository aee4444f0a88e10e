"""The router's HTTP: requests pass unchanged to the server that is ranked first (`recording/proxy.py`)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from warmkv.platform.engine_router.router import EngineRouter
from warmkv.platform.recording.exchange import Exchange, api_of
from warmkv.platform.recording.proxy import LONGEST_BODY, Proxy, Recorder
from warmkv.policies.breaker import Outcome

STATUS_PATH = "/v1/warmkv/route"
READY_PATH = "/readyz"
UNAVAILABLE = (502, 503, 504)


class RoutingProxy(Proxy):
    """Forwards each request to one of several servers, and to another where that one cannot be reached."""

    def __init__(self, router: EngineRouter, recorder: Recorder | None) -> None:
        super().__init__("", recorder)
        self._router, self._numbers = router, itertools.count()

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == STATUS_PATH:
            return web.json_response(self._router.figures())
        if request.path == READY_PATH:
            taking = self._router.taking()
            return web.json_response({"servers": taking}, status=200 if taking else 503)
        return await super()._forward(request)

    @asynccontextmanager
    async def _upstream(
        self, request: web.BaseRequest, body: AsyncIterator[bytes], exchange: Exchange | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = await _whole(body)
        number, router = next(self._numbers), self._router
        engine = ""
        outcome: Outcome = "none"
        try:
            order = router.choose(number, data if api_of(request.method, request.raw_path) else b"")
            for engine in order:
                router.sent(number, engine)
                try:
                    answer = await self._sent(engine, request, data if request.body_exists else None)
                    break
                except (aiohttp.ClientConnectionError, TimeoutError, OSError):
                    router.failed(number, engine)
                    if engine == order[-1]:
                        raise
            async with answer:
                if exchange is not None:
                    exchange.replica = engine
                if answer.status < 400:
                    router.began(number, engine)
                try:
                    yield answer
                except aiohttp.ClientError:
                    router.failed(number, engine)
                    raise
                outcome = "failed" if answer.status in UNAVAILABLE else "ok"
        finally:
            router.ended(number, engine, outcome)


async def _whole(body: AsyncIterator[bytes]) -> bytes:
    """Return a request's body, which must be known before it is routed. Raises HTTPRequestEntityTooLarge."""
    data = bytearray()
    async for part in body:
        data += part
        if len(data) > LONGEST_BODY:
            raise web.HTTPRequestEntityTooLarge(max_size=LONGEST_BODY, actual_size=len(data))
    return bytes(data)

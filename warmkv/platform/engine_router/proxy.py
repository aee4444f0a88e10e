"""The router's HTTP: requests pass to the server that is ranked first, unchanged but for what concerns their caches."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from warmkv.platform.engine_router.prompts import (
    SALT_FIELD,
    Prompt,
    prompt_of,
    read_body,
    root_of,
    salt_of,
    tenant_salt,
    with_salt,
    without_reports,
)
from warmkv.platform.engine_router.router import EngineRouter, address_of
from warmkv.platform.engine_router.tokens import Tokenizers, poster
from warmkv.platform.json_values import TooManyValuesError
from warmkv.platform.recording.exchange import LONGEST_BODY, Exchange, api_of
from warmkv.platform.recording.proxy import Proxy, Recorder
from warmkv.policies.breaker import Outcome
from warmkv.prefixes import hashing

if TYPE_CHECKING:  # which needs the packages of the extra `route`
    from warmkv.platform.engine_router.event_feed import EventFeed

STATUS_PATH = "/v1/warmkv/route"
READY_PATH = "/readyz"
UNAVAILABLE = (502, 503, 504)
LARGE_BODY = 1 << 20  # bytes from which on a body is read in a thread
RANK_HEADER = "X-data-parallel-rank"
"""By which vLLM is told the rank that computes a request."""


class RoutingProxy(Proxy):
    """Forwards each request to one of several servers, and to another where that one cannot be reached.

    With `feeds`, by server, it knows what these hold by their KV events, and asks them for the tokens of each prompt,
    within `token_seconds`. With a `secret`, each API key has a prefix cache of its own in the servers.
    """

    def __init__(
        self,
        router: EngineRouter,
        recorder: Recorder | None,
        *,
        feeds: Mapping[str, EventFeed] | None = None,
        secret: str | None = None,
        token_seconds: float = 1.0,
    ) -> None:
        super().__init__("", recorder)
        self._router, self._numbers = router, itertools.count()
        self._feeds, self._secret, self._token_seconds = feeds or {}, secret, token_seconds
        self._tokenizers = Tokenizers()

    @asynccontextmanager
    async def running(self, host: str, port: int) -> AsyncIterator[int]:
        """Listen, and follow the servers' events, while the context is entered; yield the port. Raises OSError."""
        following = [asyncio.create_task(feed.follow()) for feed in self._feeds.values()]
        try:
            async with super().running(host, port) as bound:
                yield bound
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    def figures(self) -> dict[str, Any]:
        """Return what is known of each server, and why requests went where they did."""
        figures = self._router.figures()
        for name, feed in self._feeds.items():
            figures["engines"][name]["events"] = feed.figures
        if self._feeds:
            figures["tokenized"] = {"asked": self._tokenizers.asked, "failed": self._tokenizers.failed}
        return figures

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == STATUS_PATH:
            return web.json_response(self.figures())
        if request.path == READY_PATH:
            taking = len(self._router.taking())
            return web.json_response({"servers": taking}, status=200 if taking else 503)
        return await super()._forward(request)

    @asynccontextmanager
    async def _upstream(
        self, request: web.BaseRequest, body: AsyncIterator[bytes], exchange: Exchange | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = await _whole(body)
        number, router = next(self._numbers), self._router
        try:
            data, prompt = await self._prompt(request, data)
        except RecursionError:
            raise web.HTTPBadRequest(text="the body is nested too deeply") from None
        except TooManyValuesError as error:
            raise web.HTTPBadRequest(text=f"the body has {error}") from None
        engine = ""
        outcome: Outcome = "none"
        try:
            order = router.choose(number, prompt)
            for engine in order:
                router.sent(number, engine)
                try:
                    address, rank = address_of(engine)
                    own = {RANK_HEADER: rank} if rank else {}
                    answer = await self._sent(address, request, data if request.body_exists else None, own)
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
                    if engine in self._feeds:
                        self._feeds[engine].answered()
                try:
                    yield answer
                except aiohttp.ClientError:
                    router.failed(number, engine)
                    raise
                outcome = "failed" if answer.status in UNAVAILABLE else "ok"
        finally:
            router.ended(number, engine, outcome)

    async def _prompt(self, request: web.BaseRequest, data: bytes) -> tuple[bytes, Prompt]:
        """Return a body as it is sent on, and its prompt. Raises RecursionError or TooManyValuesError."""
        api = api_of(request.method, request.path)
        if api is None:
            return data, Prompt()
        headers = {name.lower(): value for name, value in request.headers.items()}
        if len(data) < LARGE_BODY:
            data, asked, prompt = self._read(headers, data)
        else:
            data, asked, prompt = await asyncio.to_thread(self._read, headers, data)
        if asked is None:
            return data, prompt
        if not self._feeds or any(str(asked.get("model")) in feed.loras for feed in self._feeds.values()):
            return data, prompt
        assert self._session is not None
        post = poster(self._session, self._token_seconds)
        servers = list(dict.fromkeys(address_of(name)[0] for name in self._router.taking()))
        ids = await self._tokenizers.tokens(post, servers, api, request.path, asked, headers)
        return data, prompt._replace(tokens=hashing.block_hashes(ids, self._router.block_size, root_of(salt_of(asked))))

    def _read(self, headers: Mapping[str, str], data: bytes) -> tuple[bytes, dict[str, Any] | None, Prompt]:
        """Return a body as it is sent on, what it says, and its prompt."""
        asked = read_body(data)
        if asked is None:
            return data, None, Prompt()
        if self._feeds:
            data, asked = without_reports(data, asked)
        if self._secret is not None:
            salt = tenant_salt(self._secret, headers, asked)
            data = with_salt(data, asked, salt)
            asked = asked | {SALT_FIELD: salt}
        return data, asked, prompt_of(headers, asked, self._router.block_size)


async def _whole(body: AsyncIterator[bytes]) -> bytes:
    """Return a request's body, which must be known before it is routed. Raises HTTPRequestEntityTooLarge."""
    data = bytearray()
    async for part in body:
        data += part
        if len(data) > LONGEST_BODY:
            raise web.HTTPRequestEntityTooLarge(max_size=LONGEST_BODY, actual_size=len(data))
    return bytes(data)

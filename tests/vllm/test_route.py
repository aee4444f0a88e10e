"""`warmkv route` in front of two real vLLM servers: what they hold is known by their events, to the block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

import aiohttp
import pytest

pytest.importorskip("vllm", reason="make test-vllm")

from tests.polling import PATIENCE
from tests.vllm.conftest import BLOCK, Replica, started_replica
from warmkv.config import parse
from warmkv.platform.engine_router.event_feed import Endpoints, EventFeed
from warmkv.platform.engine_router.proxy import STATUS_PATH, RoutingProxy
from warmkv.platform.engine_router.router import EngineRouter
from warmkv.replicas.engines.vllm_start import endpoint

MODEL = "tiny"
TEXTS = {
    "messages": ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "completions": ("/v1/completions", lambda text: {"prompt": text}),
    "responses": ("/v1/responses", lambda text: {"input": text}),
}


class ApiServer:
    """Serve vLLM's own API over an engine that runs already."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server: Any = replica.run(self._made())
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve([listening]), replica.loop)
        folder = replica.engine._folder
        self.endpoints = Endpoints(endpoint(folder, "events"), endpoint(folder, "replay"))

    async def _made(self) -> Any:
        import uvicorn
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        llm = self.replica.engine._llm
        arguments = ["--model", llm.model_config.model, "--served-model-name", MODEL, "--enable-scale-out"]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
        tasks = await llm.get_supported_tasks()
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
        return uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))

    def close(self) -> None:
        self._server.should_exit = True
        self._serving.result(PATIENCE)


@pytest.fixture(scope="module")
def servers(replica: Replica) -> Iterator[list[ApiServer]]:
    other = started_replica()
    found = [ApiServer(replica), ApiServer(other)]
    yield found
    for server in found:
        server.close()
    other.close()


class Routed:
    """Send requests to a router in front of the servers, or past it."""

    def __init__(self, url: str, servers: list[ApiServer], session: aiohttp.ClientSession) -> None:
        self.url, self.servers, self._session = url, servers, session

    async def ask(self, text: str, api: str = "completions", at: str = "", key: str = "k", **more: Any) -> Any:
        path, body = TEXTS[api]
        limit = {"responses": "max_output_tokens"}.get(api, "max_tokens")
        asked = {"model": MODEL, limit: 1, "temperature": 0, **body(text), **more}
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.post((at or self.url) + path, json=asked, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def figures(self) -> Mapping[str, Any]:
        async with self._session.get(self.url + STATUS_PATH) as answer:
            found: Mapping[str, Any] = await answer.json()
            return found

    async def answered(self) -> list[int]:
        return [one["answered"] for one in (await self.figures())["engines"].values()]

    async def sent_to(self, text: str, **more: Any) -> tuple[str, str]:
        """Send a request; return the server that answered and why it was chosen."""
        before = await self.figures()
        await self.ask(text, **more)
        after = await self.figures()
        (server,) = [
            name for name, one in after["engines"].items() if one["answered"] > before["engines"][name]["answered"]
        ]
        (why,) = [why for why, count in after["routed"].items() if count > before["routed"].get(why, 0)]
        return server, why

    async def known(self) -> None:
        """Wait until the router knows as many blocks of each server as the server's own replica does."""
        async with asyncio.timeout(PATIENCE):
            for server in self.servers:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.replica.heard(), server.replica.loop))
                blocks = server.replica.engine.store._blocks
                while True:
                    told = (await self.figures())["engines"][server.url]
                    held = sum(block.copies["device"] > 0 for block in blocks._blocks.values())
                    if told["events"]["whole"] and told["known_tokens"] == held * BLOCK:
                        break
                    await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def routing(servers: list[ApiServer], secret: str | None = None) -> AsyncIterator[Routed]:
    config = parse({"prefix_cache": {"block_size": BLOCK}})
    engines = [server.url for server in servers]
    router = EngineRouter(
        engines, config, kv_tokens=10**6, ttl=3600, random=Random(0), clock=time.monotonic, events=True
    )
    feeds = {
        server.url: EventFeed(server.url, server.endpoints, BLOCK, partial(router.changed, server.url))
        for server in servers
    }
    proxy = RoutingProxy(router, None, feeds=feeds, secret=secret, token_seconds=PATIENCE)
    async with proxy.running("127.0.0.1", 0) as port, aiohttp.ClientSession() as session:
        yield Routed(f"http://127.0.0.1:{port}", servers, session)


def text(number: int, words: int = 20) -> str:
    return f"{number} " + "The council met in the hall. " * words


@pytest.mark.parametrize("api", TEXTS)
def test_what_a_server_computed_for_others_is_known_until_it_is_evicted(servers: list[ApiServer], api: str):
    async def scenario() -> None:
        numbers = iter(range(1000 * list(TEXTS).index(api), 10**6))
        async with routing(servers) as routed:
            for server in servers[::-1]:
                asked = text(next(numbers))
                await routed.ask(asked, api, at=server.url)  # past the router
                await routed.known()
                assert await routed.sent_to(asked, api=api) == (server.url, "warm")
            for _ in range(8):  # of seven blocks each
                await routed.ask(text(next(numbers)), api, at=servers[0].url)
            await routed.known()
            assert (await routed.sent_to(asked, api=api))[1] == "cold"  # though it answered the same before

    asyncio.run(scenario())


def test_keys_find_nothing_of_each_other_and_are_routed_apart(servers: list[ApiServer]):
    async def scenario() -> None:
        async with routing(servers, "secret") as routed:
            asked = text(9_999_999)
            server, why = await routed.sent_to(asked)
            await routed.known()
            assert why == "cold"
            assert await routed.sent_to(asked) == (server, "warm")
            assert (await routed.sent_to(asked, key="l"))[1] == "cold"
            await routed.known()
            assert (await routed.sent_to(asked, key="l"))[1] == "warm"
            assert (await routed.figures())["tokenized"]["failed"] == 0

    asyncio.run(scenario())

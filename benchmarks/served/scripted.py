"""The service with replicas that answer from a script: what is left to measure are its gateways."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.served.cpu import used_by_title
from benchmarks.served.load import Server
from benchmarks.served.servers import WARMKV_PARTS
from warmkv.replicas.links import Link, Links, ray_tls
from warmkv.replicas.protocol import Admitted, Delta, Finished, GenerateRequest, Started

STEP_SECONDS = 0.02  # of a model that decodes 50 tokens/s in every stream


class ScriptedReplica:
    """Answers every request with its limit of tokens, a token of each a step."""

    def __init__(self, settings: dict[str, Any], directory: Sequence[Any]) -> None:
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        self._links = Links(ray_tls("client"))
        self._answers: dict[asyncio.Future[None], tuple[Link, int, int]] = {}  # stream, and the tokens that are left
        self._stepping: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> None:
        """Answer a request over the stream that it names."""
        assert request.reply is not None
        link, stream = await self._links.to(request.reply), request.reply.stream
        link.send(stream, Admitted())
        link.send(stream, Started(self._name, 0, 0, 0, len(request.token_ids), 0, 0.0, 0.0))
        ended = asyncio.get_running_loop().create_future()
        self._answers[ended] = link, stream, request.sampling.max_tokens
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            with link.heard(lambda error: ended.done() or ended.set_exception(error)):
                await ended
        finally:
            self._answers.pop(ended, None)

    async def _step(self) -> None:
        drawn = 0
        while self._answers:
            drawn += 1
            for ended, (link, stream, left) in list(self._answers.items()):
                if left:
                    link.send(stream, Delta(" word", drawn, (drawn,)))
                    self._answers[ended] = link, stream, left - 1
                elif not ended.done():
                    link.send(stream, Finished("length", drawn))
                    ended.set_result(None)
            await asyncio.sleep(STEP_SECONDS)


@contextmanager
def scripted(gateways: int) -> Iterator[Server]:
    """Start the service with a scripted replica on a local Ray of this process."""
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from warmkv.config import parse
    from warmkv.platform.application import routed
    from warmkv.platform.document import serve_document
    from warmkv.platform.local import start_ray, with_port
    from warmkv.platform.router import PrefixRouter

    config = with_port(parse({"cluster": {"gateways": gateways}, "gateway": {"port": 0}}))
    document = serve_document(config)
    start_ray(config)
    try:
        serve.start(proxy_location="Disabled", http_options=document["http_options"])
        args = document["applications"][0]["args"]
        router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"settings": args})
        serve.run(routed(args, router, ScriptedReplica), name=config.cluster.application)
        url, cpu = (
            f"http://{config.gateway.host}:{config.gateway.port}",
            partial(used_by_title, os.getpid(), WARMKV_PARTS),
        )
        yield Server(f"{gateways} gateways", url, config.model.name, {}, cpu, ("gateway",))
    finally:
        serve.shutdown()
        ray.shutdown()

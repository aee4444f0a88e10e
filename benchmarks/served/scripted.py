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
from warmkv.replicas.protocol import Admitted, Delta, Finished, GatewayAddress, GenerateRequest, Started

STEP_SECONDS = 0.02  # of a model that decodes 50 tokens/s in every stream


class ScriptedReplica:
    """Answers every request with its limit of tokens, a token of each a step."""

    def __init__(self, settings: dict[str, Any], directory: Sequence[Any], group: str, roots: object) -> None:
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        self._links = Links(self._name, self._take, lambda link: None, ray_tls("client"))
        self._answers: dict[tuple[Link, int], int] = {}  # tokens that are left
        self._stepping: asyncio.Task[None] | None = None

    async def attend(self, gateway: GatewayAddress) -> None:
        await self._links.to(gateway)

    def _take(self, link: Link, stream: int, request: GenerateRequest | None) -> None:
        if request is None:
            self._answers.pop((link, stream), None)
            return
        link.send(stream, Admitted())
        link.send(stream, Started(self._name, 0, 0, 0, len(request.token_ids), 0, 0.0, 0.0))
        self._answers[link, stream] = request.sampling.max_tokens
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._step())

    async def _step(self) -> None:
        drawn = 0
        while self._answers:
            drawn += 1
            for (link, stream), left in list(self._answers.items()):
                if left:
                    link.send(stream, Delta(" word", drawn, (drawn,)))
                    self._answers[link, stream] = left - 1
                else:
                    link.send(stream, Finished("length", drawn))
                    del self._answers[link, stream]
            await asyncio.sleep(STEP_SECONDS)


@contextmanager
def scripted(gateways: int) -> Iterator[Server]:
    """Start the service with a scripted replica on a local Ray of this process."""
    import ray
    from ray import serve

    from warmkv.config import parse
    from warmkv.platform.application import assembled
    from warmkv.platform.document import serve_document
    from warmkv.platform.local import start_ray, with_port

    config = with_port(parse({"cluster": {"gateways": gateways}, "gateway": {"port": 0}}))
    document = serve_document(config)
    start_ray(config)
    try:
        serve.start(proxy_location="Disabled", http_options=document["http_options"])
        args = document["applications"][0]["args"]
        serve.run(assembled(args, replica=ScriptedReplica), name=config.cluster.application)
        url, cpu = (
            f"http://{config.gateway.host}:{config.gateway.port}",
            partial(used_by_title, os.getpid(), WARMKV_PARTS),
        )
        yield Server(f"{gateways} gateways", url, config.model.name, {}, cpu, ("gateway",))
    finally:
        serve.shutdown()
        ray.shutdown()

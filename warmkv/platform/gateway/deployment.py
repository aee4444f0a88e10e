"""The gateway as a Ray Serve deployment: the endpoints, and the connections to the replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

from warmkv import logs, recorders, telemetry
from warmkv.config import parse
from warmkv.platform.access_log import AccessLog
from warmkv.platform.control import RemoteControl
from warmkv.platform.gateway.access import audit
from warmkv.platform.gateway.apis.responses.store import StoredResponse
from warmkv.platform.gateway.endpoints import create_app
from warmkv.platform.gateway.http_server import ConnectionAges, HttpServer, serving
from warmkv.platform.gateway.members import Members
from warmkv.platform.gateway.replies import Replies
from warmkv.platform.gateway.sending import Sender
from warmkv.platform.gateway.service import Service
from warmkv.platform.prefix_directory import status_of
from warmkv.platform.router import Router
from warmkv.platform.whatif.actor import RemoteWhatIf
from warmkv.platform.whatif.feed import Feed
from warmkv.prefixes.misses import Told
from warmkv.prefixes.record import RequestRecord
from warmkv.replicas.background import Background
from warmkv.replicas.links import ray_tls
from warmkv.replicas.loading.tokenizer import load_tokenizer, served_context, without_torch

log = logging.getLogger("ray.serve")

RESPONSE_SECONDS = 10.0  # until all gateways have said whether they have a response
NEWS_SECONDS = 1.0  # between two times that other gateways are told of prompts


class GatewayHandle:
    """Ask all gateways for responses, by the handle of their deployment (`OtherGateways`); `name` is who asks."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name

    async def responses(self, tenant: bytes, name: str) -> Sequence[list[StoredResponse]]:
        """Return what every gateway has of a response and those before it."""
        call = self._handle.broadcast("responses", tenant, name)
        found: Sequence[list[StoredResponse]] = await call.results_async(timeout_s=RESPONSE_SECONDS)
        return found

    async def delete_response(self, tenant: bytes, name: str) -> bool:
        """Have the other gateways forget a response. Return False where none had it."""
        call = self._handle.broadcast("delete_response", tenant, name, self._name)
        return any(await call.results_async(timeout_s=RESPONSE_SECONDS))


class Gateway:
    """Parses, authenticates, tokenizes and hashes once; sends on and streams back.

    `secret` salts the tenants' prefixes; `replicas` are handles, by group; `directory` has the actors, one for each
    shard, that know the replicas.
    """

    def __init__(
        self, settings: dict[str, Any], secret: bytes, replicas: Mapping[str, Any], directory: Sequence[Any]
    ) -> None:
        from ray import serve, util

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # several are at it; their own threads spin when idle
        config = parse(settings)
        self._secret, self._directory = secret, directory
        context = serve.get_replica_context()
        self._name, self._application = context.replica_id.unique_id, context.app_name
        self._node = util.get_node_ip_address()
        self._http: HttpServer | None = None
        self._control = RemoteControl(config.cluster.application)
        self._handles = replicas
        self._gateways = serve.get_deployment_handle(context.deployment, context.app_name)  # all of them
        self._app: Any = None
        self._drop_timeout = config.gateway.request_timeout_seconds
        self._recorder = recorder = recorders.RayRecorder(*telemetry.GATEWAY, *telemetry.ROUTER)
        router = Router(config, recorder, Random(), time.monotonic)
        self._background = Background()
        for shard in router.shards:
            self._background.start(f"following shard {shard.number}", router.follow(shard, self._name))
        self._replies = Replies(self._node)
        self._sender = Sender(config, router, self._replies, time.monotonic)
        self._background.start("listening to replicas", self._replies.listen(ray_tls("server")))
        self._members = Members(replicas, self._replies.address, self._sender, f"gateway {self._name}")
        self._background.start("asking replicas to connect", self._members.ask())
        with without_torch():
            self._tokenizer = load_tokenizer(config.model)
            self._max_context = served_context(config)
        logs.forward("ray.serve")
        dropped = partial(recorder.add, telemetry.DROPPED_LINES, log="access")
        access_log, self._log = config.gateway.access_log, None
        if access_log is not None:
            self._log = AccessLog(access_log, int(config.gateway.access_log_bytes), dropped)
        self._audit = audit.opened(access_log, partial(recorder.add, telemetry.DROPPED_LINES, log="audit"))
        self._whatif = RemoteWhatIf(config.cluster.application, self._name) if config.control.whatif else None
        self._feed: Feed | None = None
        self._service = Service(
            config,
            self._sender.send,
            recorder,
            write_log=self._write_log,
            clock=time.monotonic,
            wall_clock=time.time,
            group_of=self._sender.group_of,
        )
        if self._whatif is not None:
            lost = partial(recorder.add, telemetry.DROPPED_LINES, log="whatif")
            self._feed = Feed(self._whatif.send, lambda: self._service.backlog.waiting, lost)
            self._background.start("feeding the what-if service", self._feed.run())
        if config.cluster.gateways > 1:
            self._background.start("telling other gateways", self._tell())

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, which listens at an address of its own from its start to its end."""
        others = GatewayHandle(self._gateways, self._name) if self._service.config.cluster.gateways > 1 else None
        app = create_app(
            self._service,
            self._tokenizer,
            secret=self._secret,
            max_context=self._max_context,
            status=partial(status_of, self._directory),
            drop=self._drop_prefixes,
            started_at=time.time(),
            control=self._control,
            name=self._name,
            taking=self._sender.taking,
            whatif=self._whatif,
            keep_action=self._audit.write if self._audit else None,
            others=others,
        )
        app.add_middleware(ConnectionAges)
        self._app = app
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def listening(app: Any) -> AsyncIterator[None]:
            config, give_up = self._service.config, self._replies.stop
            async with inner(app), serving(app, self._application, config, self._node, give_up) as server:
                self._http = server
                yield

        app.router.lifespan_context = listening
        return app

    def check_health(self) -> None:
        """Raise if nothing listens any more, or a task beside the requests failed; Serve then replaces the gateway."""
        self._background.check()
        if self._http is not None:
            self._http.check()

    def _write_log(self, record: RequestRecord) -> None:
        """Hand a line of the access log to whoever wants it; no request waits for them."""
        for taker in (self._log, self._feed):
            if taker is not None:
                taker.write(record)

    async def _drop_prefixes(self, tenant: str, root: bytes) -> list[int]:
        """Drop a tenant's prefixes, and in all gateways its prompts; return the bytes freed by each running replica.

        Raises what the first one that fails raises.
        """
        calls = [
            self._gateways.broadcast("forget", root),
            *(handle.broadcast("drop_prefixes", tenant) for handle in self._handles.values()),
        ]
        _, *freed = await asyncio.gather(*(call.results_async(timeout_s=self._drop_timeout) for call in calls))
        return [size for sizes in freed for size in sizes]

    async def forget(self, root: bytes) -> None:
        """Forget the earlier prompts whose hashes begin with `root`: their tokens, and what was found of them."""
        if self._app is not None:
            self._app.state.forget(root)

    async def _tell(self) -> None:
        """Tell all gateways of this one's prompts, for why later ones are not read from the cache."""
        while True:
            await asyncio.sleep(NEWS_SECONDS)
            if news := self._service.history.news(time.monotonic()):
                try:
                    await self._gateways.broadcast("learn", self._name, news).results_async(timeout_s=RESPONSE_SECONDS)
                except Exception as error:  # one is starting or gone: it lacks what only explains
                    log.info("not all gateways were told of prompts: %s: %s", type(error).__name__, error)

    async def learn(self, gateway: str, news: Sequence[Told]) -> None:
        """Remember the prompts that came to another gateway."""
        if gateway != self._name:
            self._service.history.learn(news, time.monotonic())

    async def responses(self, tenant: bytes, name: str) -> list[StoredResponse]:
        """Return what is here of a response and those that it goes on from."""
        return self._app.state.responses.chain(tenant, name) if self._app is not None else []

    async def delete_response(self, tenant: bytes, name: str, asking: str) -> bool:
        """Forget a response for the gateway `asking`, which forgets its own last. Return False if there is none."""
        return asking != self._name and self._app is not None and self._app.state.responses.delete(tenant, name)

    def __del__(self) -> None:
        self._background.cancel()
        self._members.close()
        self._replies.close()
        for written in (self._log, self._audit):
            if written is not None:
                written.close()
        self._recorder.flush()

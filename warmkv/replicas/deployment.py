"""A replica as a Ray Serve deployment: one model, one engine, one stream of events to every gateway.

Torch and transformers are imported by the replica alone: whoever deploys it starts without them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from warmkv import logs, recorders, telemetry
from warmkv.config import parse
from warmkv.gc_pause import gc_paused
from warmkv.policies.contents import Contents
from warmkv.policies.transfer import TransferTerms
from warmkv.prefixes.index import Shard
from warmkv.prefixes.roots import Roots
from warmkv.replicas import metrics
from warmkv.replicas.background import Background
from warmkv.replicas.cores import node_resources, threads_per_replica, usable_cores
from warmkv.replicas.engines import build_engine
from warmkv.replicas.links import Links, ray_tls
from warmkv.replicas.loading.tokenizer import decoder, load_tokenizer
from warmkv.replicas.protocol import BlockEvents, BlocksWanted, GatewayAddress
from warmkv.replicas.publisher import Publisher

if TYPE_CHECKING:
    from warmkv.replicas.transfer import BlockPayloads, BlocksOffered

log = logging.getLogger(__name__)


class Replica:
    """Runs an engine with the model and reports its blocks to the prefix directory.

    `directory` has the actor handles of the directory, one for each shard; their `publish` takes the reports.
    `group` is the one of `cluster.groups` that it is of; `roots` are those of the requests it will get, if known.
    """

    def __init__(
        self, settings: dict[str, Any], directory: Sequence[Any], group: str = "", roots: Roots | None = None
    ) -> None:
        from ray import get_runtime_context, serve

        with gc_paused():
            import torch

            from warmkv.replicas import device_memory
            from warmkv.replicas.answers import Answers
            from warmkv.replicas.engine.outputs import OutputProcessor
            from warmkv.replicas.engines.interface import Place

        logs.forward("ray.serve")
        whole = parse(settings)
        config = whole.groups()[group]
        self._context = context = serve.get_replica_context()
        self._config, self._directory, self._name = config, directory, context.replica_id.unique_id
        self._place = {"node": get_runtime_context().get_node_id(), "pid": os.getpid(), "group": group}
        node = self._place["node"]
        threads = threads_per_replica(config, whole.most_replicas, usable_cores(), node_resources(node))
        torch.set_num_threads(threads)
        say = partial(self._say, directory[0])
        say("loading the model")
        self._publishers = [
            Publisher(
                partial(self._send, actor),
                partial(self._snapshot, number),
                self._status,
                clock=time.time,
                shard=Shard(number, len(directory)),
            )
            for number, actor in enumerate(directory)
        ]
        tokenizer = load_tokenizer(config.model)
        place = Place(self._name, threads, device_memory.share_here(config, whole.most_replicas, node), roots)
        parts = build_engine(config, tokenizer, place, self._tell, say)
        self._engine, self._memory = parts.engine, parts.memory
        self._recorder = recorders.RayRecorder(*telemetry.REPLICA, *telemetry.TRANSFER)
        peers = serve.get_deployment_handle(context.deployment, app_name=context.app_name)
        self._lend, self._offer = peers.options(method_name="lend"), peers.options(method_name="take_over")
        self._transfers = parts.moving(TransferTerms.of(config), self._ask, self._recorder)
        outputs = OutputProcessor(self._engine, decoder(tokenizer), config.gateway.beat_seconds)
        turns = partial(self._engine.check_turning, config.gateway.stall_seconds)
        self._answers = Answers(outputs, self._transfers, turns, config.ongoing_requests, parts.compiler)
        self._links = Links(self._name, self._answers.take, self._answers.lost, ray_tls("client"))
        self._leaving = False
        self._engine.start()
        self._background = Background()
        for publisher in self._publishers:
            self._background.start(f"publishing to shard {publisher.shard.number}", publisher.run())

    def _say(self, directory: Any, phase: str) -> None:
        """Report the stage of the start to whoever waits for this replica."""
        directory.publish.remote(self._name, [BlockEvents(0, snapshot=True)], {"phase": phase})

    async def attend(self, gateway: GatewayAddress) -> None:
        """Take requests of a gateway from now on, over the connection that is opened to it, unless there is one.

        Raises OSError (or TimeoutError) where it cannot be reached.
        """
        await self._links.to(gateway)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what Serve's autoscaler goes by: the requests here, of which Serve itself knows nothing."""
        from ray.serve._private.common import RUNNING_REQUESTS_KEY

        return {RUNNING_REQUESTS_KEY: self._answers.ongoing}

    async def lend(self, wanted: BlocksWanted) -> BlockPayloads:
        """Return blocks for another replica, as far as they are in memory here."""
        return await self._transfers.lend(wanted)

    async def take_over(self, offered: BlocksOffered) -> int:
        """Take blocks of a replica that leaves; return how many are held now."""
        return await self._transfers.take_over(offered)

    async def _ask(self, wanted: BlocksWanted) -> BlockPayloads:
        response = self._lend.remote(wanted)
        try:
            payloads: BlockPayloads = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return payloads

    def status(self) -> dict[str, Any]:
        """Return the present load and contents of the replica."""
        return self._status()

    async def drop_prefixes(self, tenant: str) -> int:
        """Forget the prefixes of a tenant (its label); return the bytes that this freed. What is being read stays."""
        freed: int = await asyncio.wrap_future(self._engine.drop_prefixes(tenant))
        return freed

    async def contents(self, most: int) -> Contents:
        """Return at most `most` of the stored blocks, with their lives, as they are between two steps."""
        return await asyncio.wrap_future(self._engine.contents(most))

    def check_health(self) -> None:
        """Raise if the engine has ended or stands still, or nothing is published; Serve then replaces the replica."""
        self._background.check()
        self._engine.check_turning(self._config.gateway.hung_seconds)

    async def __del__(self) -> None:
        """Let what is in flight end, hand blocks over, then close the engine and the store.

        Answers that take longer go on elsewhere, where their prompts' blocks are by then.
        Called by Serve, which kills the replica after `ClusterConfig.stop_seconds`.
        """
        cluster, clock = self._config.cluster, asyncio.get_running_loop().time
        await self._answers.drain(cluster.drain_seconds)
        until = clock() + cluster.handover_seconds
        try:
            async with asyncio.timeout(cluster.handover_seconds):
                await self._hand_over()
        except TimeoutError:
            log.warning("handing blocks over took more than %.1f s and was ended", cluster.handover_seconds)
        except Exception:
            log.exception("the blocks of this replica are not handed over")
        await self._answers.give_up()
        await asyncio.to_thread(self._engine.stop, max(0.0, until - clock()))
        self._recorder.flush()

    async def _hand_over(self) -> None:
        """Send the hottest blocks to other replicas, if any go on serving."""
        if not self._config.cluster.handover_seconds or not await asyncio.to_thread(self._others_run):
            return
        self._leaving = True  # whoever leaves as well counts on this replica no more
        await asyncio.gather(*(shard.publish.remote(self._name, [], self._status()) for shard in self._directory))
        known = await asyncio.gather(*(shard.status.remote() for shard in self._directory))
        replicas = {name: replica for shard in known for name, replica in shard["replicas"].items()}
        names = {name for name, replica in replicas.items() if "phase" not in replica and self._is_peer(replica)}
        began = time.monotonic()
        taken = await self._transfers.hand_over(sorted(names - {self._name}), self._holders, self._offer.remote)
        log.info("%d blocks were handed over in %.1f s", taken, time.monotonic() - began)

    def _is_peer(self, status: Mapping[str, Any]) -> bool:
        return bool(status.get("group") == self._place["group"])

    def _others_run(self) -> bool:
        """Return True if Serve goes on with replicas of this deployment."""
        from ray import serve

        application = serve.status().applications.get(self._context.app_name)
        deployment = application.deployments.get(self._context.deployment) if application is not None else None
        return deployment is not None and deployment.replica_states.get("RUNNING", 0) > 0

    async def _holders(self, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        """Return the other replicas that hold these blocks, as the directory knows."""
        parts = await asyncio.gather(
            *(
                actor.elsewhere.remote(self._name, list(filter(Shard(number, len(self._directory)).owns, keys)))
                for number, actor in enumerate(self._directory)
            )
        )
        return {key: names for part in parts for key, names in part.items()}

    def _tell(self, stored: Sequence[bytes], evicted: Sequence[bytes], tier: str) -> None:
        for publisher in self._publishers:
            publisher.delta(stored, evicted, tier)

    async def _send(self, actor: Any, batches: list[BlockEvents], status: dict[str, Any] | None) -> bool:
        followed: bool = await actor.publish.remote(self._name, batches, status)
        return followed

    def _snapshot(self, shard: int) -> None:
        publisher, store = self._publishers[shard], self._engine.store
        self._engine.call(lambda: publisher.snapshot(store.full_blocks()))

    def _status(self) -> dict[str, Any]:
        stats = self._engine.stats()
        metrics.record(self._recorder, stats, self._engine.store)
        leaving = {"phase": "handing over"} if self._leaving else {}
        return {**asdict(stats), **self._place, "memory": self._memory, **leaving}

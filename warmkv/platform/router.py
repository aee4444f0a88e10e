"""The router: sends a request to the replica where its longest prefix is warm, unless that one is overloaded.

It lives in every gateway, with its own copy of the prefix index, so that a decision makes no call. A choice is booked
in the same breath and counts as load until the stream ends, or concurrent requests would all pick the same replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from random import Random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from warmkv import telemetry
from warmkv.config import Config, parse
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.named_actors import NAMESPACE
from warmkv.platform.prefix_directory import FOLLOW_SECONDS, IndexFollower, directory_name
from warmkv.policies.breaker import Outcome
from warmkv.policies.dispatcher import Dispatcher
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes.index import Shard
from warmkv.replicas.protocol import GenerateRequest, ToReplica

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # between attempts to reach a directory that is away


class PrefixRouter(RequestRouter):
    """Ray Serve's hook for choosing a replica. Any fault falls back to the shortest queue and is counted."""

    def initialize_state(self, settings: dict[str, Any]) -> None:
        self._config: Config = parse(settings)
        self._dispatcher = Dispatcher(
            self._config.routing, self._config.engine.max_slots, Random(), clock=time.monotonic
        )
        self._lifetimes = Lifetimes.of(self._config.prefix_cache)
        self._following: list[asyncio.Task[None]] = []
        self._recorder = telemetry.RayRecorder(*telemetry.ROUTER)

    def taking(self) -> int:
        """Count the replicas that run, by what Serve says, and whose circuit is not open. Any thread may ask."""
        return len(self._dispatcher.breaker.taking([replica.unique_id for replica in self.curr_replicas.copy()]))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in order of preference; Serve takes the first that has room."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        try:
            request = pending_request.args[0] if pending_request is not None and pending_request.args else None
            if pending_request is not None and isinstance(request, ToReplica):
                return self._named(request.replica, candidate_replicas, pending_request)
            self._follow_directory()
            return self._choose(candidate_replicas, pending_request)
        except Exception:  # an exception here would hang the request
            log.exception("routing failed; taking the shortest queue")
            self._recorder.add(telemetry.ROUTED, 1, reason="fault")
            return [list(candidate_replicas)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._dispatcher.in_flight.book(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._dispatcher.in_flight.release(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._dispatcher.index.drop_replica(replica_id.unique_id)
        self._dispatcher.in_flight.drop(replica_id.unique_id)

    def _choose(self, candidates: list[RunningReplica], pending: PendingRequest | None) -> list[list[RunningReplica]]:
        attempt = pending.args[0] if pending is not None and pending.args else None
        if not isinstance(attempt, Attempt) or not candidates or pending is None or pending.future.done():
            return [list(candidates)]
        request = attempt.request
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        in_flight = self._dispatcher.in_flight
        for earlier in attempt.given_up:
            if earlier.booking is not None:
                in_flight.give_up(earlier.booking)
        tried = {earlier.replica for earlier in attempt.given_up if earlier.replica is not None}
        key = attempt.booking = pending.metadata.internal_request_id
        choice = self._dispatcher.choose(
            key,
            request.hashes,
            list(by_name),
            wanted=request.replica,
            queues=self._queues(candidates),
            avoid=tried,
            leaves=self._leaves(request),
            config=attempt.routing,
        )
        if choice.fetch != request.fetch:
            attempt.request = replace(request, fetch=choice.fetch)

        def chosen(future: asyncio.Future[RunningReplica]) -> None:
            if future.cancelled():
                in_flight.release(key)
            else:
                attempt.replica = future.result().replica_id.unique_id
                attempt.others = len(set(by_name) - tried - {attempt.replica})

        pending.future.add_done_callback(chosen)
        loop = asyncio.get_running_loop()  # Serve gives routers one of their own

        def began() -> None:
            loop.call_soon_threadsafe(in_flight.began, key)

        def ended(outcome: Outcome) -> None:
            loop.call_soon_threadsafe(self._dispatcher.ended, key, attempt.replica, outcome)

        attempt.began, attempt.ended = began, ended
        self._recorder.add(telemetry.ROUTED, 1, reason=choice.reason)
        loop.call_soon(self._dispatcher.mend, choice, request.hashes)  # not before the decision
        return [[by_name[name]] for name in choice.order]

    def _leaves(self, request: GenerateRequest) -> int:
        """Leading blocks of a prompt that the replica which computes it will hold."""
        cache = self._config.prefix_cache
        if not cache.enabled:
            return 0
        lifetimes = request.lifetimes or self._lifetimes
        return lifetimes.stored_blocks(request.marks, len(request.hashes), cache.block_size)

    def _named(
        self, name: str, candidates: list[RunningReplica], pending: PendingRequest
    ) -> list[list[RunningReplica]]:
        """Return the replica of that name alone. Raises at once if it is gone."""
        found = [replica for replica in candidates if replica.replica_id.unique_id == name]
        if not found and not pending.future.done():
            pending.future.set_exception(LookupError(f"replica {name} is gone"))
        return [found]

    def _queues(self, candidates: list[RunningReplica]) -> dict[str, int]:
        """Return the requests in flight by replica as last reported to Serve, those of other gateways included."""
        if self._config.cluster.gateways == 1:
            return {}
        known = self.replica_queue_len_cache
        return {replica.replica_id.unique_id: known.get(replica.replica_id) or 0 for replica in candidates}

    def _follow_directory(self) -> None:
        if not self._following or any(task.done() for task in self._following):
            for task in self._following:
                task.cancel()
            shards = self._config.directory.shards
            loop = asyncio.get_running_loop()
            self._following = [loop.create_task(self._follow(Shard(number, shards))) for number in range(shards)]

    async def _follow(self, shard: Shard) -> None:
        """Keep the copy of the index up to date; while the directory is away, the copy goes on serving."""
        import ray
        from ray import serve

        router = serve.get_replica_context().replica_id.unique_id
        config, label = self._config, str(shard.number)
        follower, directory = IndexFollower(self._dispatcher.index, shard, time.time), None
        while True:
            try:
                name = directory_name(config.cluster.application, shard.number)
                directory = directory or ray.get_actor(name, namespace=NAMESPACE)
                booked = sum(self._dispatcher.in_flight.load.values())
                update = await directory.follow.remote(follower.epoch, follower.version, FOLLOW_SECONDS, router, booked)
                staleness = await follower.apply(update)
                self._recorder.set(telemetry.FOLLOWING, 1, shard=label)
                if staleness is not None:
                    self._recorder.observe(telemetry.STALENESS, staleness)
            except Exception as error:
                log.warning("the prefix directory cannot be reached: %s", error)
                self._recorder.set(telemetry.FOLLOWING, 0, shard=label)
                directory = None
                await asyncio.sleep(RETRY_SECONDS)

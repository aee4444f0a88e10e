"""The router: sends a request to the replica where its longest prefix is warm, unless that one is overloaded.

It lives in every gateway, with its own copy of the prefix index, so that a decision calls nobody. A choice is booked
in the same breath and counts as load until the stream ends, or concurrent requests would all pick the same replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from warmkv import telemetry
from warmkv.config import Config, RoutingConfig, parse
from warmkv.platform.prefix_directory import NAMESPACE, apply_change, directory_name
from warmkv.policies.routing import rank
from warmkv.prefixes.index import PrefixIndex
from warmkv.replicas.protocol import GenerateRequest

log = logging.getLogger("ray.serve")


class Bookings:
    """Requests in flight per replica, each booked once and released once, whatever order the calls come in."""

    def __init__(self) -> None:
        self._booked: dict[str, str] = {}  # request -> replica
        self.load: dict[str, int] = {}

    def book(self, request: str, replica: str) -> None:
        self.release(request)
        self._booked[request] = replica
        self.load[replica] = self.load.get(replica, 0) + 1

    def release(self, request: str, replica: str | None = None) -> None:
        """Forget a booking; with `replica`, only if it is there: a late call for an earlier attempt changes nothing."""
        if replica is not None and self._booked.get(request) != replica:
            return
        replica = self._booked.pop(request, None)
        if replica is not None:
            self.load[replica] -= 1
            if not self.load[replica]:
                del self.load[replica]


class PrefixRouter(RequestRouter):
    """Ray Serve's hook for choosing a replica. Any fault falls back to the shortest queue and is counted."""

    def initialize_state(self, settings: dict[str, Any]) -> None:
        self._config: Config = parse(settings)
        self._index = PrefixIndex()
        self._bookings = Bookings()
        self._following: asyncio.Task[None] | None = None
        self._recorder = telemetry.Recorder(*telemetry.ROUTER)

    def configure(self, routing: RoutingConfig) -> None:
        """Route by other parameters from now on; a request brings those that were in force when it came."""
        if routing is not self._config.routing:
            self._config = self._config.model_copy(update={"routing": routing})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in order of preference; Serve takes the first that has room."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        try:
            self._follow_directory()
            return self._choose(candidate_replicas, pending_request)
        except Exception:  # an exception here would hang the request
            log.exception("routing by prefix failed; taking the shortest queue")
            self._recorder.add(telemetry.ROUTED, 1, reason="fault")
            return [list(candidate_replicas)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._bookings.book(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._bookings.release(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._index.drop_replica(replica_id.unique_id)

    def _choose(self, candidates: list[RunningReplica], pending: PendingRequest | None) -> list[list[RunningReplica]]:
        request = pending.args[0] if pending is not None and pending.args else None
        if isinstance(request, GenerateRequest) and request.terms is not None:
            self.configure(request.terms.routing)
        if not isinstance(request, GenerateRequest) or self._config.routing.policy != "prefix_cost":
            return [random.sample(candidates, min(2, len(candidates)))]  # Serve takes the shorter queue: power of two
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        warm = self._index.longest_match(request.hashes)
        order = rank(list(by_name), len(request.hashes), warm, self._bookings.load, self._config.routing)
        if request.replica is not None and request.replica in by_name and self._config.routing.allow_request_replica:
            order = [request.replica, *(name for name in order if name != request.replica)]
            reason = "asked"
        elif not warm:
            reason = "cold"
        else:
            reason = "warm" if warm.get(order[0], 0) == max(warm.values()) else "load"
        assert pending is not None
        key = pending.metadata.internal_request_id
        self._bookings.book(key, order[0])
        pending.future.add_done_callback(lambda future: self._bookings.release(key) if future.cancelled() else None)
        self._recorder.add(telemetry.ROUTED, 1, reason=reason)
        return [[by_name[name]] for name in order]

    def _follow_directory(self) -> None:
        if self._following is None or self._following.done():
            self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        """Keep the copy of the index up to date; while the directory is away, the copy goes on serving."""
        import ray

        epoch, version, directory = "", 0, None
        while True:
            try:
                directory = directory or ray.get_actor(
                    directory_name(self._config.cluster.application), namespace=NAMESPACE
                )
                update = await directory.follow.remote(epoch, version, self._config.directory.follow_seconds)
                if update.whole:
                    self._index = PrefixIndex()
                for change in update.changes:
                    apply_change(self._index, change)
                epoch, version = update.epoch, update.version
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("the prefix directory cannot be reached: %s", error)
                directory = None
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1.0)

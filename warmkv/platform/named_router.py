"""Serve's hook for its calls of replicas: one that names a replica goes there, any other to the shortest queue.

Clients' requests do not pass here: gateways send them over connections of their own (`gateway/sending.py`).
"""

from __future__ import annotations

import logging

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from warmkv.replicas.protocol import ToReplica

log = logging.getLogger(__name__)


class NamedRouter(RequestRouter):
    """Routes calls among replicas (`ToReplica`)."""

    def initialize_state(self) -> None: ...

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks. A call of one that is gone raises at once."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.args[0] if pending_request.args else None
        if not isinstance(wanted, ToReplica):
            return [candidate_replicas]
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted.replica]
        if not found and not pending_request.future.done():
            pending_request.future.set_exception(LookupError(f"replica {wanted.replica} is gone"))
        return [found]

"""Draining a node of the Ray cluster before its pod ends: the preStop hook of the manifests, `warmkv k8s drain`.

SIGTERM ends Ray at once. So before it, Ray is told that the node goes: Serve starts replicas and gateways elsewhere as
far as there is room, and stops those here when the replacement is up or the time has come; their requests end first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from warmkv.config import Config
from warmkv.faults import UserError

SPARE_SECONDS = 30.0
"""Time for a replacement to start on another node, where there is room for one, before a replica is stopped."""

PAUSE_SECONDS = 0.5
OF_SERVE = ("SERVE_REPLICA::", "SERVE_PROXY_ACTOR")  # what the names of its actors begin with


class DrainError(UserError):
    """A node that cannot be drained; the message says why."""


def seconds_to_drain(config: Config) -> float:
    """Return the longest time that draining a node takes; the grace period of its pod must be above it."""
    return SPARE_SECONDS + config.cluster.drain_seconds + config.cluster.handover_seconds


def drain_node(seconds: float) -> list[str]:
    """Drain the node that this process runs on, within `seconds`; return the actors that are still on it then.

    Raises DrainError where there is no Ray, or where it refuses.
    """
    import ray
    from ray._private.state import GlobalState
    from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    try:
        ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise DrainError(f"no Ray runs on this node: {error}") from None
    context = ray.get_runtime_context()
    node, address = context.get_node_id(), context.gcs_address
    ray.shutdown()  # a node that is drained and idle ends, and what is connected to it ends with it
    deadline = int(1000 * (time.time() + seconds))
    accepted, why = GcsClient(address=address).drain_node(node, DRAIN_NODE_REASON_PREEMPTION, "its pod ends", deadline)
    if not accepted:
        raise DrainError(f"Ray does not drain node {node}: {why}")
    state = GlobalState()
    state._initialize_global_state(
        GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    )

    def left() -> list[str]:
        actors = state.actor_table(None, None, "ALIVE").values()
        return sorted(
            actor["Name"]
            for actor in actors
            if actor["Address"]["NodeID"] == node and actor["Name"].startswith(OF_SERVE)
        )

    return wait_until_empty(left, seconds, time.monotonic, time.sleep)


def wait_until_empty(
    left: Callable[[], list[str]], seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> list[str]:
    """Ask what is left until nothing is, or `seconds` have passed; return it."""
    until = clock() + seconds
    while (names := left()) and clock() < until:
        sleep(PAUSE_SECONDS)
    return names

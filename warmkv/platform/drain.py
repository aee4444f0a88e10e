"""Draining a node of the Ray cluster before its pod ends: the preStop hook of the manifests, `warmkv k8s drain`.

SIGTERM ends Ray at once. So before it, Ray is told that the node goes: Serve starts replicas and gateways elsewhere as
far as there is room, and stops those here when the replacement is up or the time has come; their requests end first.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable

from warmkv.config import Config
from warmkv.faults import UserError

SPARE_SECONDS = 30.0
"""Time for a replacement to start on another node, where there is room for one, before a replica is stopped.

Serve takes `STOP_SECONDS` of it for itself (`warmkv/config/cluster.py`)."""

END_SECONDS = 10.0
"""Time for Ray to end a node that is drained, before its pod is killed."""

CONNECTION_SECONDS = 60.0
"""Age of a client's connection from which on an answer ends it: a new one goes to the new cluster of an upgrade."""

IDLE_SECONDS = 120.0
"""Time after which an idle connection is closed by both servers: above Ray's `DEFAULT_UVICORN_KEEP_ALIVE_TIMEOUT_S`."""

PAUSE_SECONDS = 0.5
OF_SERVE = ("SERVE_REPLICA::", "SERVE_PROXY_ACTOR")  # what the names of its actors begin with


class DrainError(UserError):
    """A node that cannot be drained; the message says why."""


def seconds_to_drain(config: Config) -> float:
    """Return the longest time that draining a node takes; the grace period of its pod must be above it."""
    return SPARE_SECONDS + config.cluster.drain_seconds + config.cluster.handover_seconds


def seconds_after_upgrade(config: Config) -> int:
    """Return the seconds for which the old cluster of an upgrade must stay for its answers to end.

    The last request over a connection comes before it is old, or after a pause then, and may take all its time. Longer
    is needed only by what follows an answer of minutes on the same connection.
    """
    return math.ceil(CONNECTION_SECONDS + IDLE_SECONDS + config.gateway.request_timeout_seconds)


def drain_node(seconds: float) -> list[str]:
    """Drain the Ray node at an address of this machine, within `seconds`; return the actors that are still on it then.

    Nothing here connects to the node itself: one that is drained and idle ends, with all that is connected to it.
    Raises DrainError where there is no such node, or where Ray refuses.
    """
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray._private.state import GlobalState
    from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    try:
        address = canonicalize_bootstrap_address_or_die(None)  # RAY_ADDRESS, or what runs here
    except ConnectionError as error:
        raise DrainError(f"no Ray runs here: {error}") from None
    state = GlobalState()
    state._initialize_global_state(
        GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    )
    here = [node["NodeID"] for node in state.node_table() if node["Alive"] and _is_here(node["NodeManagerAddress"])]
    if len(here) != 1:
        raise DrainError(f"{len(here)} nodes of the Ray cluster at {address} have an address of this machine, not one")
    (node,) = here
    deadline = int(1000 * (time.time() + seconds))
    accepted, why = GcsClient(address=address).drain_node(node, DRAIN_NODE_REASON_PREEMPTION, "its pod ends", deadline)
    if not accepted:
        raise DrainError(f"Ray does not drain node {node}: {why}")

    def left() -> list[str]:
        actors = state.actor_table(None, None, "ALIVE").values()
        return sorted(
            actor["Name"]
            for actor in actors
            if actor["Address"]["NodeID"] == node and actor["Name"].startswith(OF_SERVE)
        )

    return wait_until_empty(left, seconds, time.monotonic, time.sleep)


def _is_here(address: str) -> bool:
    """Return True for an address of this machine, on which alone something can listen."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def wait_until_empty(
    left: Callable[[], list[str]], seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> list[str]:
    """Ask what is left until nothing is, or `seconds` have passed; return it."""
    until = clock() + seconds
    while (names := left()) and clock() < until:
        sleep(PAUSE_SECONDS)
    return names

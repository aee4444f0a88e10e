"""Names of what runs of an application: actors, found for every call, since they may be new; groups of replicas."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

NAMESPACE = "warmkv"


def replicas_name(group: str) -> str:
    """Return the name of the deployment of a group of replicas."""
    return f"replica-{group}" if group else "replica"


async def call(name: str, method: str, *args: Any) -> Any:
    """Call a method of the actor of that name. Raises what it raises, ValueError where no actor has the name."""
    import ray

    actor = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
    return await getattr(actor, method).remote(*args)


def end(name: str) -> None:
    """Kill the actor of that name for good, if there is one."""
    import ray

    with contextlib.suppress(ValueError):  # there is none
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


def start(name: str, kind: type, *args: Any, keep: bool = False) -> Any:
    """Start an actor that outlives who starts it and is restarted when it dies.

    One of that name is ended first; with `keep` it is returned instead.
    """
    import ray

    if not keep:
        end(name)
    options = {"lifetime": "detached", "max_restarts": -1, "num_cpus": 0, "max_concurrency": 1000}
    return ray.remote(kind).options(name=name, namespace=NAMESPACE, get_if_exists=keep, **options).remote(*args)

"""Names of what runs of an application: actors, found for every call, since they may be new; groups of replicas."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

NAMESPACE = "warmkv"


class ActorAwayError(ConnectionError):
    """Say that an actor does not answer. What it was asked for may have been done."""


def replicas_name(group: str) -> str:
    """Return the name of the deployment of a group of replicas."""
    return f"replica-{group}" if group else "replica"


async def call(name: str, method: str, *args: Any) -> Any:
    """Call a method of the actor of that name. Raises what it raises, ActorAwayError where it does not answer."""
    import ray
    from ray.exceptions import RayActorError

    away = f"the actor {name} does not answer: it is being started anew, or is no more"
    try:
        actor = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
    except ValueError as error:
        raise ActorAwayError(away) from error
    try:
        return await getattr(actor, method).remote(*args)
    except RayActorError as error:
        raise ActorAwayError(away) from error


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

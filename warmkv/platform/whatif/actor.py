"""The what-if service on Ray: a named actor beside the directory, and replays in a process of lowest priority."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from warmkv import recorders, telemetry
from warmkv.config import Config, WhatIfConfig
from warmkv.platform import named_actors
from warmkv.platform.control import RemoteControl
from warmkv.platform.live_config_store import store_of
from warmkv.platform.prefix_directory import status_of
from warmkv.platform.whatif.autopilot import Autopilot
from warmkv.platform.whatif.kept import Memory
from warmkv.platform.whatif.replays import Basis, Replayed, Round, replays
from warmkv.platform.whatif.service import WhatIf
from warmkv.platform.whatif.sizes import Held
from warmkv.policies.contents import Contents
from warmkv.prefixes.record import RequestRecord

PATIENCE = 10.0  # seconds that the replicas have for telling what they hold
IDLE = "chrt --idle 0"  # runs while a core has nothing else to do, and stops for whatever wakes up
NICEST = "nice -n 19"  # where the system has no such class: the least share of a core


class WhatIfActor(WhatIf):
    """The service as Ray runs it."""

    def __init__(self, start: Config, settings: WhatIfConfig, directory: Sequence[Any]) -> None:
        async def held() -> Held:
            return Held.of(await status_of(directory))

        application = start.cluster.application

        async def contents(most: int) -> Sequence[Contents]:
            return await contents_of_replicas(application, tuple(start.groups()), most)

        control = RemoteControl(application)
        memory = Memory(store_of(start.control), application, time.time())
        recorder = recorders.RayRecorder(*telemetry.WHATIF, application=application)
        super().__init__(
            start,
            settings,
            replayed_on_ray,
            control.history,
            held,
            contents,
            recorder,
            memory,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self._autopilot: Autopilot | None = None
        if (steps := start.control.autopilot) is not None:
            table, window = super().table, self.window
            self._autopilot = Autopilot(start, steps, memory, control, table, lambda: window, held, recorder, time.time)
        self._running: list[asyncio.Task[None]] = []

    async def take(self, gateway: str, records: Sequence[RequestRecord], waiting: int) -> float:
        """Take a gateway's records; the first ones start the replays."""
        if not self._running:
            self._running.append(asyncio.create_task(self.run()))
            if self._autopilot is not None:
                self._running.append(asyncio.create_task(self._autopilot.run()))
        return await super().take(gateway, records, waiting)

    async def table(self) -> dict[str, Any]:
        """Return the candidates, the best first, what they rest on, and what the autopilot does; None: it is off."""
        return {**await super().table(), "autopilot": self._autopilot.status() if self._autopilot else None}


async def contents_of_replicas(application: str, groups: Sequence[str], most: int) -> Sequence[Contents]:
    """Ask all running replicas which blocks they hold, `most` of each at most."""
    from ray import serve

    async def of(group: str) -> Sequence[Contents]:
        name = named_actors.replicas_name(group)
        replicas = await asyncio.to_thread(serve.get_deployment_handle, name, application)
        found: list[Contents] = await replicas.broadcast("contents", most).results_async(timeout_s=PATIENCE)
        return [replace(contents, group=group) for contents in found]

    return [contents for found in await asyncio.gather(*map(of, groups)) for contents in found]


async def replayed_on_ray(work: Round) -> AsyncGenerator[Basis | Replayed]:
    """Replay a round in a Ray task that reserves no core and takes none; it is killed when nobody follows it any more.

    Its process has the lowest priority from its start on, and replays this round alone.
    """
    import ray

    lowest = IDLE if shutil.which("chrt") else NICEST
    environment = {"py_executable": f"{lowest} {shlex.quote(sys.executable)}"}
    task = ray.remote(num_cpus=0, max_calls=1, max_retries=0, runtime_env=environment)(_replay)
    steps = task.remote(work)
    ended = False
    try:
        async for step in steps:
            yield await step
        ended = True
    finally:
        if not ended:
            ray.cancel(steps, force=True)


def _replay(work: Round) -> Iterator[Basis | Replayed]:
    yield from replays(work)


class RemoteWhatIf:
    """The actor of an application, found by its name for every call: it may have been started anew."""

    def __init__(self, application: str, gateway: str) -> None:
        self._name, self._gateway = whatif_name(application), gateway

    async def send(self, records: Sequence[RequestRecord], waiting: int) -> float:
        """Hand over a gateway's records; return when the service was started."""
        started: float = await named_actors.call(self._name, "take", self._gateway, records, waiting)
        return started

    async def table(self) -> dict[str, Any]:
        found: dict[str, Any] = await named_actors.call(self._name, "table")
        return found

    async def add(self, changes: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = await named_actors.call(self._name, "add", changes)
        return found

    async def remove(self, name: str) -> None:
        await named_actors.call(self._name, "remove", name)


def whatif_name(application: str) -> str:
    return f"{application}-what-if"


def start_whatif(config: Config, directory: Sequence[Any]) -> None:
    """Start the application's what-if actor anew, or end it where `control.whatif` is not set any more."""
    name = whatif_name(config.cluster.application)
    if config.control.whatif is None:
        named_actors.end(name)
    else:
        named_actors.start(name, WhatIfActor, config, config.control.whatif, directory)

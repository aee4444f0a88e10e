"""The services that are compared, as applications on one local Ray; each is asked in its turn."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.served.cpu import used_by_title
from benchmarks.served.load import Server
from warmkv import recorders, telemetry
from warmkv.platform.gateway.deployment import Gateway
from warmkv.replicas.deployment import Replica

REPLAY = "ray::_replay"  # title of the process that replays a round
SERVING = ("gateway", "replica")
AGENT = "dashboard/agent.py"  # Ray's process that gathers the metrics of a node


class TimedRecorder(recorders.RayRecorder):
    """Records, and adds up the CPU seconds of its calls by thread; reading the clock counts as well."""

    def __init__(self, *metrics: telemetry.Metric, application: str | None = None) -> None:
        self._seconds: defaultdict[int, float] = defaultdict(float)
        super().__init__(*metrics, application=application)

    @property
    def seconds(self) -> float:
        """Return the CPU seconds so far."""
        return sum(self._seconds.copy().values())

    def add(self, counter: telemetry.Metric, value: float, **labels: str) -> None:
        with self._timed():
            super().add(counter, value, **labels)

    def set(self, gauge: telemetry.Metric, value: float, **labels: str) -> None:
        with self._timed():
            super().set(gauge, value, **labels)

    def observe(self, histogram: telemetry.Metric, value: float, **labels: str) -> None:
        with self._timed():
            super().observe(histogram, value, **labels)

    def flush(self) -> None:
        with self._timed():
            super().flush()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self._seconds[threading.get_ident()] += time.thread_time() - begun


class TimedGateway(Gateway):
    """A gateway that knows what recording costs it."""

    def __init__(self, *arguments: Any) -> None:
        recorders.RayRecorder = TimedRecorder  # type: ignore[misc]
        super().__init__(*arguments)

    def recording_seconds(self) -> float:
        """Return the CPU seconds of its calls that record."""
        return self._recorder.seconds  # type: ignore[attr-defined,no-any-return]


class TimedReplica(Replica):
    """A replica that knows what recording costs it."""

    def __init__(self, *arguments: Any) -> None:
        recorders.RayRecorder = TimedRecorder  # type: ignore[misc]
        super().__init__(*arguments)

    def recording_seconds(self) -> float:
        """Return the CPU seconds of its calls that record."""
        return self._recorder.seconds  # type: ignore[attr-defined,no-any-return]


def recording_seconds(application: str) -> float:
    """Return the CPU seconds that the gateways and replicas of an application spent on recording so far."""
    from ray import serve

    return sum(
        sum(serve.get_deployment_handle(part, application).broadcast("recording_seconds").results(timeout_s=60))
        for part in SERVING
    )


@dataclass(frozen=True, slots=True)
class Contestant:
    """An application: its settings, and its parts."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    gateway: type[Any] = Gateway
    replica: type[Any] = Replica


@contextmanager
def side_by_side(contestants: Sequence[Contestant], replicas: int) -> Iterator[list[Server]]:
    """Start the contestants on a local Ray of this process, with so many replicas of one thread each."""
    import ray
    from ray import serve

    from warmkv.config import parse
    from warmkv.platform.application import assembled
    from warmkv.platform.document import serve_document
    from warmkv.platform.local import start_ray, with_port

    configs = [
        with_port(
            parse(
                {
                    "cluster": {"application": one.name, "replicas": replicas, "cpus_per_replica": 0},
                    "engine": {"threads": 1},
                    "gateway": {"port": 0},
                    **one.settings,
                }
            )
        )
        for one in contestants
    ]
    start_ray(configs[0])
    try:
        documents = [serve_document(config) for config in configs]
        serve.start(proxy_location="Disabled", http_options=documents[0]["http_options"])
        servers = []
        for one, config, document in zip(contestants, configs, documents, strict=True):
            (described,) = document["applications"]
            application = assembled(described["args"], replica=one.replica, gateway=one.gateway)
            serve.run(application, name=one.name, route_prefix=f"/{one.name}")
            parts = {"gateway": f"{one.name}:gateway", "replica": f"{one.name}:replica"}
            parts |= {"replay": REPLAY, "agent": AGENT}
            cpu = partial(used_by_title, os.getpid(), parts)
            url = f"http://{config.gateway.host}:{config.gateway.port}/{one.name}"
            extra = {"warmkv": {"ignore_eos": True}}
            servers.append(Server(one.name, url, config.model.name, extra, cpu, ("gateway",)))
        yield servers
    finally:
        serve.shutdown()
        ray.shutdown()

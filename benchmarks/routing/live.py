"""The whole service under the same traffic with one router or another: hit rate and time to first token."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.results import Results
from benchmarks.live.cores import QuotaError, held_to
from benchmarks.live.service import ask_all, replicas
from benchmarks.live.traffic import Traffic, plan
from warmkv.config import Config, parse
from warmkv.platform.local import start_ray, with_port
from warmkv.platform.operator_key import with_operator
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.steps.costs import StepCost
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.workload import access_log

CONTESTANTS = {"warmkv": ("prefix_cost", "power_of_two", "affinity"), "vllm": ("prefix_cost", "affinity")}
"""By the engine: vLLM's replicas are three processes each, and those of three services do not fit beside each other."""

REPLICAS = 4
BLOCK = 32  # vLLM's on a CPU, or a multiple of it
MEMORY = 32 << 20  # bytes of a replica's prefix cache: 11,000 tokens of the shipped model
AT_ONCE = StepCost(1e-9, 0.0, 0.0)
TRAFFIC = Traffic(
    sessions=120,
    rate=1.5,
    turns=(2, 4),
    think=1.0,
    prompts=24,
    zipf=0.9,
    system_lines=(80, 130),
    answer_tokens=(4, 8),
)
HOTTEST = 0.5
KINDS = {
    "zipf": TRAFFIC,
    "hot": replace(TRAFFIC, hottest=HOTTEST),
    "pressure": replace(TRAFFIC, sessions=300, prompts=120, rate=1.8),  # three times what all replicas hold
}
SLICE = 40  # sessions that a service is asked before it is the next one's turn
WHOLE = {"pressure"}  # kinds of which all sessions are asked in one turn: queues take minutes to build up


def race(
    repeats: int, seed: int, cores: float, engine: str, quick: bool, results: Results, say: Callable[[str], None]
) -> None:
    """Every contestant with each kind of traffic, new services in each repeat.

    A machine is not as fast at all times, so the services are up side by side, and are asked a slice of the sessions in
    turns, or all where that hid what is measured (`WHOLE`), one service at a time. Each replica is held to its `cores`
    if they are not 0 and the machine allows quotas.
    """
    for repeat in range(repeats):
        say(f"repeat {repeat + 1} of {repeats}")
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            key = secrets.token_urlsafe(32)
            services = stack.enter_context(_services(engine, Path(folder), key))
            if cores:
                pids = [replica["pid"] for service in services for replica in replicas(service.url, key).values()]
                try:
                    stack.enter_context(held_to(cores, pids))
                except QuotaError as error:
                    results.note(f"all replicas share the machine's cores: {error}")
                    cores = 0.0  # in the next repeat as well
            for kind, traffic in KINDS.items():
                shape = replace(traffic, sessions=6, rate=2.0) if quick else traffic
                _ask(services, kind, replace(shape, seed=seed + repeat), repeat, results, say)


@dataclass(frozen=True, slots=True)
class Service:
    """A contestant that answers, and the settings that it has."""

    name: str
    url: str
    config: Config

    @property
    def log(self) -> Path:
        assert self.config.gateway.access_log is not None
        return self.config.gateway.access_log


@contextmanager
def _services(engine: str, folder: Path, operator_key: str) -> Iterator[list[Service]]:
    """Yield all contestants over an engine, each an application of its own."""
    import ray
    from ray import serve

    from benchmarks.routing.peers import parts
    from warmkv.platform.application import assembled

    contestants = CONTESTANTS[engine]
    first = with_port(parse({"cluster": {"replicas": len(contestants) * REPLICAS}, "gateway": {"port": 0}}))
    host, port = first.gateway.host, first.gateway.port
    start_ray(first)
    try:
        serve.start(http_options={"host": host, "port": port})
        found = []
        for name in contestants:
            application = name.replace("_", "-")
            config = parse(
                {
                    "cluster": {"replicas": REPLICAS, "application": application},
                    **_room(engine),
                    "gateway": {"host": host, "port": port, "access_log": str(folder / f"{name}.jsonl")},
                }
            )
            config = config.model_copy(update={"gateway": with_operator(config.gateway, operator_key)})
            args = config.model_dump(mode="json", exclude_defaults=True)
            serve.run(assembled(args, **parts(name)), name=application, route_prefix=f"/{application}")
            found.append(Service(name, f"http://{host}:{port}/{application}", config))
        yield found
    finally:
        serve.shutdown()
        ray.shutdown()


def _room(engine: str) -> dict[str, dict[str, Any]]:
    """Return the settings of replicas that keep MEMORY bytes of prefixes; vLLM has one pool for these and what runs."""
    if engine == "warmkv":
        return {"engine": {"threads": 1}, "prefix_cache": {"memory_bytes": MEMORY}}
    return {
        "engine": {"kind": engine, "threads": 1, "kv_bytes": MEMORY // 2},
        "prefix_cache": {"memory_bytes": MEMORY // 2, "block_size": BLOCK},
    }


def _ask(
    services: Sequence[Service],
    kind: str,
    traffic: Traffic,
    repeat: int,
    results: Results,
    say: Callable[[str], None],
) -> None:
    """The sessions of one kind of traffic, to all services."""
    sessions = [replace(session, key=f"{kind}-{session.key}") for session in plan(traffic)]
    before = {service.name: len(_records(service)) for service in services}
    ttfts: dict[str, dict[tuple[int, int, int], float]] = {service.name: {} for service in services}  # by request
    size = len(sessions) if kind in WHOLE else SLICE
    slices = [sessions[start : start + size] for start in range(0, len(sessions), size)]
    for number, part in enumerate(slices):
        rebased = [replace(session, begins=session.begins - part[0].begins) for session in part]
        turn = (number + repeat) % len(services)
        for service in (*services[turn:], *services[:turn]):
            samples = ask_all(service.url, service.config.model.name, rebased, lambda _: None)
            ttfts[service.name] |= {(number, sample.session, sample.turn): sample.ttft for sample in samples}
        say(f"{kind}: {number + 1} of {len(slices)} parts asked")
    for service in services:
        label = f"{service.name}_{kind}"
        for quantile in (50, 99):
            seconds = float(np.percentile(list(ttfts[service.name].values()), quantile))
            results.add(f"{label}_ttft_p{quantile}_ms", seconds * 1e3)
        records = _records(service)[before[service.name] :]
        rate, ideal = hit_rate(records), ideal_hit_rate(records, service.config)
        results.add(f"{label}_hit_rate", rate)
        results.add(f"{label}_hit_rate_of_ideal", rate / ideal)
        say(f"{label}: hit rate {rate:.3f}, ideal {ideal:.3f}")
    ours = services[0]
    for peer in services[1:]:
        theirs = ttfts[peer.name]
        pairs = [seconds / theirs[request] for request, seconds in ttfts[ours.name].items()]
        results.add(f"ttft_paired_vs_{peer.name}_{kind}", float(np.median(pairs)))


def _records(service: Service) -> Sequence[RequestRecord]:
    return access_log.read(service.log).requests if service.log.exists() else ()


def hit_rate(records: Sequence[RequestRecord]) -> float:
    """Share of prompt tokens that were reused."""
    return sum(record.cached_tokens for record in records) / sum(record.input_tokens for record in records)


def ideal_hit_rate(records: Sequence[RequestRecord], config: Config) -> float:
    """Return the hit rate of one cache as large as all replicas' together, into which every prompt comes at once."""
    replicas, engine, cache = config.cluster.replicas, config.engine, config.prefix_cache
    slots = engine.kv_bytes if isinstance(engine.kv_bytes, str) else engine.kv_bytes * replicas
    one = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"replicas": 1}),
            "engine": engine.model_copy(update={"kv_bytes": slots}),
            "prefix_cache": cache.model_copy(update={"memory_bytes": cache.memory_bytes * replicas}),
        }
    )
    jobs = run(records, one, Variant(), AT_ONCE).jobs
    return sum(job.reused for job in jobs) / sum(record.input_tokens for record in records)

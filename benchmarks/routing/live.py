"""The whole service under the same traffic with one router or another: hit rate and time to first token."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.engine.results import Results
from benchmarks.live.service import ask_all
from benchmarks.live.traffic import Traffic, plan
from warmkv.config import Config, parse
from warmkv.platform.local import start_ray, with_port
from warmkv.policies.costs import StepCost
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator import access_log
from warmkv.simulator.replay import run
from warmkv.simulator.variants import Variant

CONTESTANTS = ("prefix_cost", "power_of_two", "affinity")
REPLICAS = 4
AT_ONCE = StepCost(1e-9, 0.0, 0.0)
TRAFFIC = Traffic(
    sessions=80,
    rate=1.2,
    turns=(2, 4),
    think=1.0,
    prompts=24,
    zipf=0.9,
    system_lines=(80, 130),
    answer_tokens=(4, 8),
)
HOTTEST = 0.5


def race(repeats: int, seed: int, quick: bool, results: Results, say: Callable[[str], None]) -> None:
    """Every contestant with each kind of traffic; a new service for each, in another order in each repeat."""
    traffic = replace(TRAFFIC, sessions=6, rate=2.0) if quick else TRAFFIC
    for repeat in range(repeats):
        kinds = {
            "zipf": replace(traffic, seed=seed + repeat),
            "hot": replace(traffic, seed=seed + repeat, hottest=HOTTEST),
        }
        turn = repeat % len(CONTESTANTS)
        for name in (*CONTESTANTS[turn:], *CONTESTANTS[:turn]):
            say(f"{name}, repeat {repeat + 1} of {repeats}")
            _serve(name, kinds, results, say)


def _serve(name: str, kinds: dict[str, Traffic], results: Results, say: Callable[[str], None]) -> None:
    import ray
    from ray import serve

    from benchmarks.routing.peers import router
    from warmkv.platform.application import routed

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "access.jsonl"
        config = with_port(
            parse(
                {
                    "cluster": {"replicas": REPLICAS},
                    "engine": {"threads": 1},
                    "prefix_cache": {"memory_bytes": "32MiB"},
                    "gateway": {"port": 0, "access_log": str(log)},
                }
            )
        )
        start_ray(config)
        try:
            serve.start(http_options={"host": config.gateway.host, "port": config.gateway.port})
            args = config.model_dump(mode="json", exclude_defaults=True)
            serve.run(routed(args, router(name, config)), name=config.cluster.application)
            before = 0
            for kind, traffic in kinds.items():
                sessions = [replace(session, key=f"{kind}-{session.key}") for session in plan(traffic)]
                samples = ask_all(f"http://127.0.0.1:{config.gateway.port}", config.model.name, sessions, say)
                records = access_log.read(log).requests[before:]
                before += len(records)
                label = f"{name}_{kind}"
                for quantile in (50, 99):
                    seconds = float(np.percentile([sample.ttft for sample in samples], quantile))
                    results.add(f"{label}_ttft_p{quantile}_ms", seconds * 1e3)
                rate, ideal = hit_rate(records), ideal_hit_rate(records, config)
                results.add(f"{label}_hit_rate", rate)
                results.add(f"{label}_hit_rate_of_ideal", rate / ideal)
                say(f"{label}: hit rate {rate:.3f}, ideal {ideal:.3f}")
        finally:
            serve.shutdown()
            ray.shutdown()


def hit_rate(records: Sequence[RequestRecord]) -> float:
    """Share of prompt tokens that were reused."""
    return sum(record.cached_tokens for record in records) / sum(record.input_tokens for record in records)


def ideal_hit_rate(records: Sequence[RequestRecord], config: Config) -> float:
    """That of one cache as large as those of all replicas together, into which every prompt comes at once."""
    memory = config.prefix_cache.memory_bytes * config.cluster.replicas
    one = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"replicas": 1}),
            "prefix_cache": config.prefix_cache.model_copy(update={"memory_bytes": memory}),
        }
    )
    jobs = run(records, one, Variant(), AT_ONCE).jobs
    return sum(job.reused for job in jobs) / sum(record.input_tokens for record in records)

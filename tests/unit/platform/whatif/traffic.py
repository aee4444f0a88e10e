"""Made-up traffic whose best settings are known, as a service with known step times would have logged it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.simulator.conversations import config, record, run, with_timings
from warmkv.config import Config
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts

TRUE = UniformCosts(PhaseCosts(StepCost(0.005, 1e-3, 1e-6), StepCost(0.003, 4e-4, 1e-6)))
OFFSET = 1.7e9  # Unix time of the first arrival
GAP = 400.0  # seconds from one use of a prompt to the next: the default TTL of 300 s is too short for it
PROMPTS, CYCLES = 20, 8
TOKENS = 64


def settings(*flags: str) -> Config:
    """Return the service as it was started: it listens to nobody, and has room for everything."""
    return config("prefix_cache.block_size=4", "prefix_cache.memory_bytes=1GiB", *flags)


def prompts() -> list[RequestRecord]:
    """Return twenty prompts that come again every 400 s, each followed by one that never comes again."""
    found = []
    for turn in range(CYCLES * PROMPTS):
        arrival = turn * GAP / PROMPTS
        for token, at in ((turn % PROMPTS, arrival), (1000 + turn, arrival + 1)):
            found.append(replace(record(at, [token] * TOKENS, 4, name=f"{token}-{at}"), api="chat", max_tokens=4))
    return found


def evaluated(folder: Path) -> Path:
    """Write an evaluation in which half of the cache leaves the answers as they are, and a fifth does not."""
    sample = {"task": "t", "variant": "v", "length": 1000, "depth": 0, "sample": 0, "prompt_tokens": 1000}
    scores = {"full": {1.0: 1.0}, "snapkv": {0.2: 0.6, 0.4: 0.999, 0.6: 0.999}}
    rows = [
        {**sample, "policy": policy, "share": share, "score": score, "budget": round(1000 * share)}
        for policy, measured in scores.items()
        for share, score in measured.items()
    ]
    file = folder / "results.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def logged(records: Sequence[RequestRecord], served_by: Config, **options: Any) -> list[RequestRecord]:
    """Return what the access log of such a service would say of the requests; `options` are of `simulate`."""
    jobs, _ = run(records, served_by, cost=TRUE, **options)
    return [replace(line, status="ok") for line in with_timings(jobs, OFFSET, outside=0.01)]

"""Small made-up logs for the simulator's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from warmkv.config import Config, load
from warmkv.prefixes.breakpoints import breakpoints, read_candidates
from warmkv.prefixes.hashing import block_hashes, chain_root, prefix_key
from warmkv.prefixes.record import Candidate, Mark, RequestRecord
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cluster.cluster import Outcome, simulate
from warmkv.simulator.cluster.memory import resolved
from warmkv.simulator.cluster.replica import Job
from warmkv.simulator.steps.costs import Cost, PhaseCosts, Roofline, StepCost, StepTimes, UniformCosts
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant

ROOT = chain_root(b"test")
BLOCK = 4
# Powers of two: sums of them are exact, so that two ways of adding up agree to the last bit.
EXACT = StepCost(2**-6, 2**-10, 2**-16)
# Crosses within the lengths of `logs`: few entries are bound by the first roof, many by the second.
TWO_ROOFS = Roofline((StepCost(2**-6, 2**-11, 2**-14), StepCost(2**-7, 2**-10, 2**-11)))


def record(
    arrival: float,
    tokens: Sequence[int],
    output: int = 1,
    ends: Sequence[int] = (),
    ttls: Sequence[str | None] = (),
    policy: str = "full",
    name: str = "",
) -> RequestRecord:
    """Return a request for a prompt of these tokens, whose content blocks end at `ends` and are marked by `ttls`."""
    hashes = block_hashes(tokens, BLOCK, ROOT)
    marks = breakpoints(ends, ttls, 1)

    def key(position: int) -> bytes:
        return prefix_key(tokens, position, BLOCK, hashes, ROOT)

    return RequestRecord(
        id=name or f"{arrival}",
        arrival=arrival,
        tenant="t",
        model="m",
        api="messages",
        policy=policy,
        block_size=BLOCK,
        input_tokens=len(tokens),
        output_tokens=output,
        hashes=tuple(hashes),
        marks=tuple(Mark(mark.position, mark.ttl, key(mark.position)) for mark in marks),
        reads=tuple(Candidate(at, key(at)) for at in read_candidates(ends, marks, 20)),
    )


def config(*flags: str) -> Config:
    """Return a small service whose KV takes 2 bytes a token."""
    small = [
        "engine.step_tokens=8",
        "engine.kv_bytes=1GiB",
        "engine.max_slots=4",
        "engine.max_queue=1000000",
        "simulator.model={layers: 1, kv_heads: 1, head_dim: 1, dtype_bytes: 1}",
    ]
    return resolved(load(flags=[*small, *flags], environ={}))


def run(
    records: Iterable[RequestRecord],
    settings: Config,
    variant: Variant = Variant(),
    cost: StepTimes = EXACT,
    **options: Any,
) -> tuple[list[Job], Outcome]:
    jobs, lifetimes = prepare(list(records), settings, variant)
    return jobs, simulate(jobs, settings, lifetimes, kv_shape(settings).token_bytes, cost, **options)


def uniform(cost: Cost) -> UniformCosts:
    """Return the same cost for every phase and kind of policy."""
    return UniformCosts(PhaseCosts(cost, cost))


def with_timings(jobs: Iterable[Job], offset: float = 1.7e9, outside: float = 0.0) -> list[RequestRecord]:
    """Return the log that the simulated cluster would have written; `outside` seconds pass outside the replica."""
    return [
        replace(
            job.record,
            arrival=job.arrival + offset,
            replica=job.replica,
            cached_tokens=job.reused,
            resident_bytes=job.slot_bytes,
            queue=job.started - job.arrival,
            prefill=job.first - job.started if outside else 0.0,
            ttft=job.first - job.arrival + outside,
            e2e=job.finished - job.arrival + outside,
        )
        for job in jobs
    ]


@st.composite
def logs(draw: st.DrawFn, policies: Sequence[str] = ("full", "snapkv@6", "streaming_llm@0.5")) -> list[RequestRecord]:
    """Return requests over a small tree of prompts, many of which begin alike, some at the same moment."""
    records = []
    arrival = 0.0
    for number in range(draw(st.integers(1, 14))):
        arrival += draw(st.sampled_from([0.0, 0.0, 2**-7, 0.25, 1.0, 8.0])) + draw(st.integers(0, 64)) / 1024
        tokens = [draw(st.integers(0, 1))] * draw(st.integers(1, 30)) + [2] * draw(st.integers(0, 9))
        ends = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=3)))
        long = draw(st.integers(0, len(ends)))
        ttls = ["1h" if index < long else "5m" for index in range(len(ends))]
        output = draw(st.integers(0, 40))
        records.append(record(arrival, tokens, output, ends, ttls, draw(st.sampled_from(policies)), f"r{number}"))
    return records

"""Results for people, side by side in the terminal, and for programs, as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.cache.measures import Percentiles
from warmkv.simulator.reports.conclusion import conclude, duration
from warmkv.simulator.steps.costs import StepTimes
from warmkv.simulator.studies.replays.replay import Amount, Result
from warmkv.simulator.studies.replays.summary import figures
from warmkv.terminal import plain_table, ruled_table, show_table, three_digits

MOST_ROWS = 10
"""Variants in the first table, which fits on a screen of 80 columns and 24 lines."""


def show_overview(
    results: Sequence[Result], records: Sequence[RequestRecord], arrivals: str, source: str, console: Console
) -> None:
    """Print what was replayed, a row for each variant, what was refused, and what follows from them."""
    first, columns = results[0], columns_of(records)
    span = max(first.seconds, float(np.ptp(columns.arrival)) if len(columns) else 0.0)
    alive = first.replicas
    replicas = "1 replica" if alive.peak == 1 else f"{alive.peak} replicas"
    if alive.mean != alive.peak:
        replicas = f"{alive.mean:.2f} replicas on average, at most {alive.peak}"
    console.print(
        f"{first.requests:,} requests over {span:,.0f} s, {columns.input_tokens.sum():,} prompt and "
        f"{columns.output_tokens.sum():,} output tokens\n{replicas}; {arrivals}\nstep times: {source}\n"
    )
    some_refused = any(r.refused for r in results)
    last = ("bill", "refused") if some_refused else ("bill",)
    table = plain_table("policy", "TTL", "hit", "stored", "slots", "TTFT p50", "p99", *last, gap=2)
    for r in results[:MOST_ROWS]:
        ttl = "as marked" if r.ttl is None else duration(r.ttl)
        sizes = (_size(r.stored.peak), _size(r.slots.peak))
        times = (three_digits(r.ttft.p50 * 1000), three_digits(r.ttft.p99 * 1000))
        refused = (f"{r.refused / r.requests:.1%}",) if some_refused else ()
        table.add_row(r.policy, ttl, f"{r.token_hit_rate:.1%}", *sizes, *times, f"${r.dollars:,.2f}", *refused)
    show_table(table, console)
    more = f"{len(results) - MOST_ROWS} more variants and all" if len(results) > MOST_ROWS else "All"
    hit = "found, and within their TTL" if first.keeps_by_lru else "not computed"
    console.print(f"hit: prompt tokens {hit}; stored prefixes, decode slots: most; TTFT: ms")
    console.print(f"{more} figures: --details\n")
    if some_refused:
        console.print(_refusals(max(results, key=lambda r: r.refused)), style="yellow")
    for sentence in conclude(results):
        console.print(sentence)


def _refusals(result: Result) -> str:
    """Return how many requests a replay refused, and why."""
    full = "found all queues full (cluster.replicas, max_queued_requests, engine.max_slots, max_queue)"
    causes = (
        (result.too_large, "fit no replica (engine.kv_bytes, engine.max_context)"),
        (result.refused - result.too_large, full),
    )
    why = ", ".join(f"{count:,} {cause}" for count, cause in causes if count)
    return (
        f"{result.refused:,} of {result.requests:,} requests were refused under {result.policy} and are in no other "
        f"figure: {why}."
    )


def show_details(results: Sequence[Result], console: Console) -> None:
    """Print three tables with a row per variant: cache and bills, memory and latency, what the service is worth."""
    for table in (_money(results), _latency(results), _service(results)):
        show_table(table, console)


def document(results: Sequence[Result], times: StepTimes, source: str) -> dict[str, Any]:
    """Return all figures of all variants, and the step times they were computed with."""
    return {
        "step_times": {"source": source, **times.figures()},
        "variants": [{**asdict(result), "ttl": ttl_of(result.ttl), "figures": figures(result)} for result in results],
    }


def ttl_of(ttl: float | None) -> float | str | None:
    """Return a lifetime for a document: JSON has no infinity, and null is the one that was recorded."""
    return "unlimited" if ttl == math.inf else ttl


def _money(results: Sequence[Result]) -> Table:
    table = _table(
        "Cache and cost",
        "hit: share of prompt tokens not computed, of full blocks found; read, written, input: tokens billed;\n"
        "saved: against the same requests at the plain input price; gone: blocks and tails evicted, expired",
        "hit tokens",
        "hit blocks",
        "read",
        "written",
        "input",
        "bill",
        "saved",
        "gone",
    )
    for r in results:
        usage = r.usage
        table.add_row(
            *_name(r),
            f"{r.token_hit_rate:.1%}",
            f"{r.block_hit_rate:.1%}",
            *(_count(tokens) for tokens in (usage.read, usage.total_written, usage.input)),
            f"${r.dollars:,.2f}",
            f"{r.saving:.1%}",
            f"{_count(r.evictions)}, {_count(r.expirations)}",
        )
    return table


def _latency(results: Sequence[Result]) -> Table:
    table = _table(
        "Memory and latency",
        "slots, stored: MiB or GiB of decode slots and of stored prefixes in all replicas, mean and peak over time;\n"
        "TTFT, TPOT, E2E: p50, p90, p99; refused: too large for a replica, or all queues were full",
        "slots",
        "stored",
        "TTFT ms",
        "TPOT ms",
        "E2E s",
        "refused",
    )
    for r in results:
        table.add_row(
            *_name(r),
            _level(r.slots),
            _level(r.stored),
            _triple(r.ttft, 1000),
            _triple(r.tpot, 1000),
            _triple(r.e2e, 1),
            _count(r.refused),
        )
    return table


def _service(results: Sequence[Result]) -> Table:
    table = _table(
        "Service and money",
        "in SLO: share of all requests whose TTFT and TPOT stayed within simulator.slo, goodput: how many/s;\n"
        "GPU cost: of all replicas at the price of simulator.gpu, and by prompt and output tokens together",
        "TTFT p95 ms",
        "E2E p95 s",
        "in SLO",
        "goodput /s",
        "GPU hours",
        "GPU cost",
        "$ / M tokens",
    )
    for r in results:
        table.add_row(
            *_name(r),
            three_digits(r.ttft.p95 * 1000),
            three_digits(r.e2e.p95),
            f"{r.in_slo / r.requests if r.requests else 0:.1%}",
            three_digits(r.goodput),
            three_digits(r.gpu_hours),
            f"${r.gpu_dollars:,.2f}",
            f"${r.gpu_dollars_per_million_tokens:,.3f}",
        )
    return table


def _table(title: str, caption: str, *columns: str) -> Table:
    return ruled_table(title, "policy", "TTL s", *columns, caption=caption)


def _name(result: Result) -> tuple[str, str]:
    ttl = ttl_of(result.ttl)
    return result.policy, "as marked" if ttl is None else ttl if isinstance(ttl, str) else f"{ttl:g}"


def _count(number: int) -> str:
    if number < 10_000:
        return f"{number:,}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"


def _size(size: float) -> str:
    return f"{three_digits(size / 2**30)} GiB" if size >= 2**30 else f"{three_digits(size / 2**20)} MiB"


def _level(level: Amount) -> str:
    """Return mean and peak in MiB, or in GiB where there are many."""
    size, unit = (2**30, "G") if level.peak >= 10 * 2**30 else (2**20, "M")
    return f"{three_digits(level.mean / size)} {three_digits(level.peak / size)} {unit}"


def _triple(values: Percentiles, factor: float) -> str:
    return " ".join(three_digits(value * factor) for value in (values.p50, values.p90, values.p99))

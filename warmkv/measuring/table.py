"""Measurements on screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from warmkv.measuring.bench import Bench, DecodeRow, PrefillRow
from warmkv.measuring.spread import Spread
from warmkv.measuring.ttft import WARM_SHARE
from warmkv.simulator.steps.step_profile import PHASES, ErrorOfFit, StepProfile
from warmkv.terminal import ruled_table, show_table, three_digits

Row = TypeVar("Row", PrefillRow, DecodeRow)


def show_machine(found: Mapping[str, Any], model: str) -> None:
    """Print what was measured on what."""
    gpu = f"{found['gpu']}, " if found["gpu"] else ""
    print(f"{model} on {gpu}{found['cpu']}, {found['cores']} cores, {found['threads']} threads\n")


def show_bench(bench: Bench, console: Console) -> None:
    """Print prompts and decoding, policies side by side."""
    if bench.prefill:
        show_table(_prefill(bench.prefill), console)
    show_table(_decode(bench.decode), console)


def _prefill(rows: list[PrefillRow]) -> Table:
    table = _table(
        "Prompts",
        f"times in ms, median ± half the range; warm: the first {WARM_SHARE:.0%} stored by an earlier\n"
        "request; reused: warm tokens not computed again; workspace: while the prompt is computed",
        ("prompt", "prefill tok/s", "prefill", "TTFT cold", "TTFT warm", "warm / cold", "reused", "workspace MiB"),
    )
    for row, first in _blocks(rows):
        table.add_row(
            row.policy,
            f"{row.prompt_tokens:,}" if first else "",
            f"{row.tokens_per_second:,.0f}",
            *(_milliseconds(seconds) for seconds in (row.prefill, row.ttft_cold, row.ttft_warm)),
            f"{row.ttft_warm.median / row.ttft_cold.median:.2f}",
            f"{row.warm_tokens:,}",
            _mebibytes(row.workspace_bytes),
        )
    return table


def _decode(rows: list[DecodeRow]) -> Table:
    table = _table(
        "Decoding",
        "times in ms, median ± half the range; TPOT: a step of the batch; hand-off: from a\n"
        "computed prompt to a slot; kept: entries per layer and KV head; KV: slots of the\n"
        "batch, everything counted, room for new tokens included; pool: idle slots as well",
        ("prompt", "batch", "kept", "TPOT", "tok/s", "hand-off", "KV MiB", "of full", "pool MiB"),
    )
    for row, first in _blocks(rows):
        table.add_row(
            row.policy,
            f"{row.prompt_tokens:,}" if first else "",
            str(row.batch) if first else "",
            f"{row.kept_tokens:,.0f}",
            _milliseconds(row.tpot),
            f"{row.tokens_per_second:,.0f}",
            _milliseconds(row.hand_off),
            _mebibytes(row.slot_bytes),
            f"{row.slot_bytes / row.full_bytes:.1%}",
            _mebibytes(row.pool_bytes),
        )
    return table


def show_profile(profile: StepProfile, console: Console) -> None:
    """Print the coefficients of every policy and phase, with their errors."""
    table = _table(
        "Step times",
        "a step takes a + b * tokens + c * context + d * tokens * context; error:\n"
        "relative, mean and 95th percentile; out: of each point when all others are fitted",
        ("phase", "a ms", "b us", "c ns", "d ps", "points", "error in", "error out"),
    )
    for policy in profile.policies:
        for phase in PHASES:
            fit = getattr(policy, phase)
            table.add_row(
                policy.policy if phase == PHASES[0] else "",
                phase.replace("_", "-"),
                *(three_digits(value) for value in (fit.a * 1e3, fit.b * 1e6, fit.c * 1e9, fit.d * 1e12)),
                str(fit.points),
                _error(fit.in_sample),
                _error(fit.out_of_sample),
                end_section=phase == PHASES[-1],
            )
    show_table(table, console)
    console.print(
        f"fitted to the least of the repeats; their median was {profile.disturbance:.0%} above it on average "
        "(near 0 on an idle machine)\n"
    )


def _blocks(rows: list[Row]) -> list[tuple[Row, bool]]:
    """Return rows, and whether each begins a block of one prompt length and batch."""
    places = [(row.prompt_tokens, getattr(row, "batch", 0)) for row in rows]
    return [(row, at == 0 or places[at] != places[at - 1]) for at, row in enumerate(rows)]


def _table(title: str, caption: str, columns: tuple[str, ...]) -> Table:
    return ruled_table(title, "policy", *columns, caption=caption)


def _milliseconds(seconds: Spread) -> str:
    return f"{three_digits(1000 * seconds.median)} ±{seconds.share:.0%}"


def _mebibytes(size: int) -> str:
    return three_digits(size / 2**20)


def _error(error: ErrorOfFit) -> str:
    return f"{error.mean:.1%} {error.p95:.1%}"

"""Plots of a bench, as SVG files: a step against the context, a prompt against its length, bytes by policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from warmkv.chart_style import INK, STYLE, Look, legend, looks
from warmkv.measuring.bench import Bench
from warmkv.measuring.spread import Spread

PANELS = 4
"""Batches that are drawn at most, of the smallest to the largest."""


def save_all(bench: Bench, folder: Path) -> list[Path]:
    """Draw what was measured into a folder, which is made if need be; returns the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figures = {"tpot": step_against_context(bench), "bytes": bytes_by_policy(bench)}
        if bench.prefill:
            figures["prefill"] = prompt_against_length(bench)
        files = []
        for name, figure in figures.items():
            files.append(folder / f"{name}.svg")
            figure.savefig(files[-1], metadata={"Date": None})
    return files


def step_against_context(bench: Bench) -> Figure:
    """Time of a decode step over prompt length, a panel for each batch, a line for each policy."""
    batches = sorted({row.batch for row in bench.decode})
    if len(batches) > PANELS:
        batches = [*batches[: PANELS - 1], batches[-1]]
    look = _looks(row.policy for row in bench.decode)
    figure = Figure(figsize=(max(5.0, 3.2 * len(batches)), 3.4), layout="constrained")
    axes = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for ax, batch in zip(axes, batches, strict=True):
        for policy, line in look.items():
            rows = [row for row in bench.decode if row.policy == policy and row.batch == batch]
            _line(ax, [row.prompt_tokens for row in rows], [row.tpot for row in rows], line)
        ax.set_title(f"batch {batch}")
        _lengths_axis(ax, [row.prompt_tokens for row in bench.decode])
    axes[0].set_ylabel("TPOT, ms")
    _finish(figure, axes[0], look)
    return figure


def prompt_against_length(bench: Bench) -> Figure:
    """Time to the first token over prompt length, cold and warm, a line for each policy."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    cold, warm = figure.subplots(1, 2, sharey=True)
    look = _looks(row.policy for row in bench.prefill)
    for policy, line in look.items():
        rows = [row for row in bench.prefill if row.policy == policy]
        lengths = [row.prompt_tokens for row in rows]
        _line(cold, lengths, [row.prefill for row in rows], line)
        _line(warm, lengths, [row.ttft_warm for row in rows], line)
    cold.set_title("prefill, cold")
    warm.set_title("TTFT, 90% warm")
    cold.set_ylabel("ms")
    for ax in (cold, warm):
        _lengths_axis(ax, [row.prompt_tokens for row in bench.prefill])
    _finish(figure, cold, look)
    return figure


def bytes_by_policy(bench: Bench) -> Figure:
    """Draw bytes of one sequence's slot at the longest prompt, a bar for each policy."""
    longest = max(row.prompt_tokens for row in bench.decode)
    rows = {row.policy: row for row in bench.decode if row.prompt_tokens == longest}
    figure = Figure(figsize=(6.4, 0.8 + 0.32 * len(rows)), layout="constrained")
    ax = figure.subplots()
    sizes = [row.slot_bytes / row.batch / 2**20 for row in rows.values()]
    bars = ax.barh(list(rows), sizes, color=[line["color"] for line in _looks(rows).values()], height=0.6)
    shares = [f" {row.slot_bytes / row.full_bytes:.1%}" for row in rows.values()]
    ax.bar_label(bars, shares, fontsize=8, color=INK)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    ax.set_xlabel(f"MiB of KV a sequence, {longest:,} prompt tokens (share of the full cache)")
    return figure


def _looks(policies: Iterable[str]) -> Look:
    return looks(policies, black=("full",))


def _line(ax: Axes, lengths: list[int], seconds: list[Spread], line: dict[str, Any]) -> None:
    """Draw medians with their range, in milliseconds."""
    middle = [1000 * one.median for one in seconds]
    below = [1000 * (one.median - one.least) for one in seconds]
    above = [1000 * (one.most - one.median) for one in seconds]
    ax.errorbar(lengths, middle, yerr=[below, above], linewidth=1.5, markersize=5, elinewidth=0.8, capsize=2, **line)


def _lengths_axis(ax: Axes, lengths: list[int]) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_xlabel("prompt tokens")


def _finish(figure: Figure, ax: Axes, look: Look) -> None:
    """Begin the shared axis at zero, now that everything is drawn, and name the lines."""
    ax.set_ylim(bottom=0)
    legend(figure, look)

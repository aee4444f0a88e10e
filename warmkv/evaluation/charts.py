"""The report's charts as SVG text: heat maps, quality against bytes, the Pareto front, perplexity along the stream."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from warmkv.chart_style import INK, STYLE, legend, looks
from warmkv.evaluation.plan import FULL
from warmkv.evaluation.results import RECOMPUTED
from warmkv.evaluation.summary import Cell, Row, SummaryRow, mean, pareto
from warmkv.report_page import svg


def look_of(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return how every policy is drawn; the full cache and the recomputed window are black."""
    out = looks([*policies, FULL, RECOMPUTED], black=(FULL, RECOMPUTED))
    out[RECOMPUTED]["marker"] = None
    return out


def quality_against_bytes(entries: Sequence[SummaryRow], tasks: Sequence[str], look: dict[str, dict[str, Any]]) -> str:
    """Draw score over bytes, a line a policy: a panel for the mean over tasks and one for each task."""
    panels: list[tuple[str, list[Cell]]] = [("mean over tasks", [entry.all for entry in entries])]
    panels += [(task, [entry.tasks[task] for entry in entries if task in entry.tasks]) for task in tasks]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * columns, 2.5 * rows + 0.9), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for ax, (title, cells) in zip(axes, panels, strict=False):
            for policy in dict.fromkeys(cell.policy for cell in cells):
                of = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: cell.bytes_share)
                line = look[policy]
                if policy == FULL:
                    ax.axhline(of[0].score, color=INK, linewidth=0.9, linestyle="--")
                if len(of) > 1:
                    x, y = [cell.bytes_share for cell in of], [cell.score for cell in of]
                    ax.plot(x, y, color=line["color"], linestyle=line["linestyle"], linewidth=1.6)
                _points(ax, of, line, 90 if policy == FULL else 26)
            ax.set_title(title)
            ax.set_ylim(-0.04, 1.04)
            _bytes_axis(ax, [cell.bytes_share for entry in entries for cell in (entry.all, *entry.tasks.values())])
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        figure.supxlabel("bytes in use, share of the full cache's (log scale)", fontsize=9)
        figure.supylabel("score", fontsize=9)
        legend(figure, {policy: look[policy] for policy in dict.fromkeys(entry.all.policy for entry in entries)})
        return svg(figure, "quality")


def pareto_front(entries: Sequence[SummaryRow], look: dict[str, dict[str, Any]]) -> str:
    """Draw every policy at every share, and the line of those that none beats in bytes and score at once.

    What is not reached on all samples is drawn hollow and kept off the line: its mean is over other samples.
    """
    cells = [entry.all for entry in entries]
    front = pareto(cell for cell in cells if cell.reached == 1)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 4.4), layout="constrained")
        ax = figure.subplots()
        ax.step([c.bytes_share for c in front], [c.score for c in front], where="post", color="#999999", linewidth=1.2)
        for cell in cells:
            _points(ax, [cell], look[cell.policy], 120 if cell.policy == FULL else 42)
        for cell in front:
            left = cell.bytes_share < 0.7
            ax.annotate(
                cell.policy if cell.share is None else f"{cell.policy} {cell.share:.0%}",
                (cell.bytes_share, cell.score), xytext=(7 if left else -8, 6), textcoords="offset points", fontsize=8,
                ha="left" if left else "right",
            )  # fmt: skip
        _bytes_axis(ax, [cell.bytes_share for cell in cells])
        ax.set_xlabel("bytes in use, share of the full cache's (log scale)")
        ax.set_ylabel("score, mean over tasks")
        ax.set_ylim(-0.04, 1.08)
        legend(figure, {policy: look[policy] for policy in dict.fromkeys(cell.policy for cell in cells)})
        return svg(figure, "pareto")


def _points(ax: Axes, cells: Sequence[Cell], line: dict[str, Any], size: int) -> None:
    """Draw a marker for each cell, hollow where not all samples were reached."""
    faces = [line["color"] if cell.reached == 1 else "white" for cell in cells]
    x, y = [cell.bytes_share for cell in cells], [cell.score for cell in cells]
    ax.scatter(x, y, s=size, marker=line["marker"], facecolors=faces, edgecolors=line["color"], zorder=3)


def heat_maps(rows: Sequence[Row], shares: Sequence[float]) -> list[tuple[str, str]]:
    """Draw needle recall over depth and length: for each policy its label and a row of maps, one a share."""
    needles = [row for row in rows if row["task"] == "needle"]
    depths, lengths = (sorted({row[key] for row in needles}) for key in ("depth", "length"))
    return [
        (policy, _heat_row([row for row in needles if row["policy"] == policy], policy, shares, depths, lengths))
        for policy in dict.fromkeys(row["policy"] for row in needles)
    ]


def _heat_row(
    rows: Sequence[Row], policy: str, shares: Sequence[float], depths: Sequence[float], lengths: Sequence[int]
) -> str:
    own = {row["share"] for row in rows} == {None}
    columns: Sequence[float | None] = (None,) if own else sorted(shares, reverse=True)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(2.15 * max(5, len(columns)), 0.55 + 0.34 * len(depths) + 0.6), layout="constrained")
        axes = figure.subplots(1, max(5, len(columns)), squeeze=False, sharey=False)[0]
        for ax, share in zip(axes, columns, strict=False):
            grid = [[_mean_score(rows, share, depth, length) for length in lengths] for depth in depths]
            ax.pcolormesh(grid, vmin=0, vmax=1, cmap="cividis", edgecolors="white", linewidth=0.5)
            ax.invert_yaxis()  # the beginning of the text on top
            for y, line in enumerate(grid):
                for x, score in enumerate(line):
                    text = "–" if math.isnan(score) else f"{score:.2f}".removeprefix("0") if score < 1 else "1"
                    ink = "white" if score <= 0.5 else INK
                    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
            ax.set_xticks([x + 0.5 for x in range(len(lengths))], [_tokens(length) for length in lengths])
            ax.set_yticks([y + 0.5 for y in range(len(depths))], [f"{depth:.0%}" for depth in depths])
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
            size = [row["bytes"] / row["full_bytes"] for row in rows if row["share"] == share]
            head = "as it is" if share is None else f"{share:.0%}"
            ax.set_title(f"{head}: {mean(size):.1%} of bytes" if size else f"{head}: cannot reach", fontsize=8)
        for ax in axes[len(columns) :]:
            ax.set_visible(False)
        axes[0].set_ylabel("depth")
        axes[0].set_xlabel("tokens")
        return svg(figure, f"heat-{re.sub(r'[^a-z0-9]+', '-', policy)}")


def _mean_score(rows: Sequence[Row], share: float | None, depth: float, length: int) -> float:
    of = [r["score"] for r in rows if r["share"] == share and r["depth"] == depth and r["length"] == length]
    return mean(of) if of else math.nan


def perplexity_along(rows: Sequence[Row], max_context: int, look: dict[str, dict[str, Any]]) -> str:
    """Draw the perplexity of every segment of the stream under every policy, and over that of the recomputed window."""
    base = [row["perplexity"] for row in rows if row["policy"] == RECOMPUTED]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    end = max(row["start"] + row["tokens"] for row in rows)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.2, 3.6), layout="constrained")
        both = figure.subplots(1, 2)
        for policy in policies:
            of = [row for row in rows if row["policy"] == policy]
            at = [row["start"] + row["tokens"] / 2 for row in of]
            height = [row["perplexity"] for row in of]
            both[0].plot(at, height, **look[policy], markersize=4, linewidth=1.5)
            ratio = [value / under for value, under in zip(height, base, strict=True)]
            both[1].plot(at, ratio, **look[policy], markersize=4, linewidth=1.5)
        for ax, title in zip(both, ("perplexity (log scale)", "over that of the recomputed window"), strict=True):
            ax.set_title(title)
            ax.set_xlabel("tokens of the stream")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            if end > max_context:
                ax.axvline(max_context, color="#999999", linewidth=1)
                place = {"xycoords": ("data", "axes fraction"), "ha": "left", "va": "top", "fontsize": 8}
                ax.annotate(" the model's range", (max_context, 1), **place)
        both[0].set_yscale("log")
        both[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        both[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        both[0].yaxis.set_minor_locator(NullLocator())
        legend(figure, {policy: look[policy] for policy in policies})
        return svg(figure, "stream")


def _bytes_axis(ax: Axes, shares: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    least = min(shares)
    ticks = [tick for tick in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if tick >= least * 0.8]
    ax.set_xticks(ticks, [f"{tick:.0%}" if tick >= 0.01 else f"{tick:.1%}" for tick in ticks])
    ax.set_xlim(least * 0.8, 1.2)


def _tokens(count: int) -> str:
    return f"{count / 1024:g}K" if count >= 1024 and count % 512 == 0 else str(count)

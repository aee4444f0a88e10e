"""What a sweep shows: a table in the terminal, `results.parquet`, and `report.html`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from warmkv.report_page import Html, cell, facts, figure, page, table
from warmkv.report_page import row as html_row
from warmkv.simulator.reports import sweep_charts as charts
from warmkv.simulator.reports.figure_text import figure_text
from warmkv.simulator.studies.sweeps.figures import serves_none
from warmkv.simulator.studies.sweeps.grid import short_names, shown
from warmkv.simulator.studies.sweeps.sweep import SweepRow, names_of
from warmkv.terminal import ruled_table, show_table

MOST_LINES = 40  # of the table in the terminal; with more points it shows those on the front
COLUMNS = (
    *("hit_rate_tokens", "dollars", "saving", "ttft_p50", "ttft_p99", "e2e_p50"),
    *("resident_bytes_max", "slot_bytes_max", "quality"),
)
HEADS = {
    "hit_rate_tokens": "hit", "saving": "saved", "ttft_p50": "TTFT p50", "ttft_p99": "TTFT p99", "e2e_p50": "E2E p50",
    "resident_bytes_max": "stored", "slot_bytes_max": "slots",
}  # fmt: skip


def paths_of(rows: Sequence[SweepRow]) -> list[str]:
    """Return every path that a point sets, in the order of the grid."""
    return list(dict.fromkeys(path for row in rows for path in row.settings))


def varied(rows: Sequence[SweepRow]) -> list[str]:
    """Return those that have more than one value."""
    return [path for path in paths_of(rows) if len({row.values.get(path) for row in rows}) > 1]


def show(rows: Sequence[SweepRow], front: Sequence[str], idle: Sequence[str], console: Console) -> None:
    """Print the table in the order of the grid; of many points only those on the front."""
    listed = rows if len(rows) <= MOST_LINES else [row for row in rows if row.front]
    paths = paths_of(rows)
    names = short_names(paths)
    caption = f"*: on the Pareto front of {', '.join(front)}; stored, slots: largest bytes over all replicas"
    columns = (*COLUMNS, *(["refused"] if any(row.figures.get("refused") for row in rows) else []))
    heads = ("#", *names.values(), *(HEADS.get(name, name) for name in columns))
    table = ruled_table("", *heads, caption=caption, left=1 + len(paths))
    table.columns[0].justify = "right"
    for row in listed:
        settings = [shown(row.settings[path]) if path in row.settings else "" for path in paths]
        table.add_row(f"{row.number}{'*' * row.front}", *settings, *(text(row, name) for name in columns))
    show_table(table, console)
    if len(listed) < len(rows):
        console.print(f"{len(rows) - len(listed):,} points that are not on the front: see results.parquet")
    if none := [row.number for row in rows if serves_none(row.figures)]:
        which = ", ".join(f"#{number}" for number in none[:10]) + (" and others" if len(none) > 10 else "")
        console.print(f"no request was served, so that nothing can be concluded of it: {which}")
    for line in unfit(rows):
        console.print(line)
    for path in idle:
        console.print(f"made no difference: {path}")


def unfit(rows: Sequence[SweepRow]) -> list[str]:
    """Return the points without figures and why, a line for each reason."""
    numbers: dict[str, list[str]] = {}
    for row in rows:
        if row.unfit:
            numbers.setdefault(row.unfit, []).append(f"#{row.number}")
    return [f"not replayed, {', '.join(which)}: {why}" for why, which in numbers.items()]


def text(row: SweepRow, name: str) -> str:
    """Format a figure of a row for people."""
    return figure_text(name, row.figures.get(name))


def write_parquet(rows: Sequence[SweepRow], file: Path) -> None:
    """Write a row for every point; a setting is a column named by its path, a number where all points have numbers
    there.
    """
    columns: dict[str, Any] = {
        "number": pa.array([row.number for row in rows], pa.int32()),
        "key": [row.key for row in rows],
        "policy": [row.policy for row in rows],
        "front": [row.front for row in rows],
        "unfit": [row.unfit for row in rows],
    }
    for path in paths_of(rows):
        values = [row.values.get(path) for row in rows]
        numbers = all(value is None or isinstance(value, float) for value in values)
        texts = [None if value is None else str(value) for value in values]
        columns[path] = pa.array(values, pa.float64()) if numbers else pa.array(texts, pa.string())
    for name in names_of(rows):
        columns[name] = pa.array([row.figures.get(name) for row in rows], pa.float64())
    scratch = file.with_name(f".{file.name}.new")
    pq.write_table(pa.table(columns), scratch)
    os.replace(scratch, file)


def render(
    meta: dict[str, Any],
    rows: Sequence[SweepRow],
    front: Sequence[str],
    idle: Sequence[str],
    step_times: Sequence[str],
) -> str:
    """Render the page: the front, cost against quality, every varied setting, all points."""
    trace = meta["trace"]
    parts = [
        f"<h1>Sweep of {escape(trace['file'])}</h1>",
        f'<p class="soft">{len(rows):,} points, {trace["requests"]:,} requests.</p>',
        "<h2>Pareto front</h2>",
        f"<p>Filled, with its number in the table below: no other point is at least as good in all of "
        f"{escape(', '.join(front))} and better in one.</p>",
        figure(charts.pareto_front(rows, front)),
        "<h2>Cost against quality</h2>",
        *_quality(rows, front[0]),
    ]
    for number, path in enumerate(varied(rows)):
        parts += [f"<h2>Against {escape(path)}</h2>", "<p>A line for every choice of the other settings.</p>"]
        if path in idle:
            parts += ["<p>It made no difference.</p>"]
        parts += [figure(charts.against(rows, path, f"against-{number}"))]
    parts += [
        "<h2>All points</h2>",
        _table(rows),
        *(f"<p>{escape(line)}</p>" for line in unfit(rows)),
        "<h2>Run</h2>",
        _facts(meta, step_times),
    ]
    return page(f"warmkv sweep: {trace['file']}", parts)


def _quality(rows: Sequence[SweepRow], cost: str) -> list[str]:
    unknown = sum(row.figures["quality"] is None for row in rows)
    if unknown == len(rows):
        return ["<p>Unknown: no measured results of these policies at these budgets were given (--quality).</p>"]
    left = f" The quality of {unknown:,} points is unknown; they are left out." if unknown else ""
    names = list(dict.fromkeys((cost, "slot_bytes_max")))
    return [
        "<p>Quality is the share of the full cache's score that the policy keeps at its budget, measured by "
        f"<code>warmkv eval</code>.{left}</p>",
        figure(charts.against_quality(rows, names)),
    ]


def _table(rows: Sequence[SweepRow]) -> Html:
    paths = paths_of(rows)
    names = names_of(rows)
    lines = []
    for point in rows:
        settings = [cell(shown(point.settings.get(path, "")), "name") for path in paths]
        figures = [cell(text(point, name), "none" if point.figures.get(name) is None else "") for name in names]
        cells = [f"{point.number}{'*' * point.front}", *settings, *figures]
        lines.append(html_row(cells, "front" if point.front else "", names=0))
    return table(["#", *paths, *names], lines, names=0)


def _facts(meta: dict[str, Any], step_times: Sequence[str]) -> Html:
    return facts({"trace": meta["trace"]["sha256"], "step times": "; ".join(step_times), "warmkv": meta["warmkv"]})

"""The charts of a sweep as SVG text: figures against each setting, the Pareto front, cost against quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

from warmkv.chart_style import COLOURS, MARKERS, STYLE, Look, legend, looks
from warmkv.report_page import svg
from warmkv.simulator.studies.sweeps.grid import label, shown
from warmkv.simulator.studies.sweeps.sweep import SweepRow

PANELS = ("hit_rate_tokens", "dollars", "ttft_p50", "ttft_p99", "tpot_p50", "e2e_p99")
MOST_LINES = 10  # with more of them a legend says nothing: they are drawn alike, under their mean
MOST_NAMED = 4  # points that lie on each other
RATES = ("hit_rate", "saving", "in_slo", "quality")
DECADES = 8.0  # a range from which on an axis is logarithmic


def against(rows: Sequence[SweepRow], path: str, name: str) -> str:
    """Draw six figures against a setting, a line for every choice of the others."""
    lines: dict[str, list[SweepRow]] = {}
    for row in rows:
        if path in row.settings:
            lines.setdefault(label({other: v for other, v in row.settings.items() if other != path}), []).append(row)
    place, ticks = _places(rows, path)
    look = looks(list(lines))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.2, 5.6), layout="constrained")
        for ax, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
            few = len(lines) <= MOST_LINES
            everything: list[tuple[float, float]] = []
            for other, of in lines.items():
                curve = sorted((place(row), y) for row in of if (y := row.figures.get(panel)) is not None)
                style = look[other] if few else {"color": "#BBBBBB", "linewidth": 0.8}
                ax.plot([x for x, _ in curve], [y for _, y in curve], markersize=4, **style)
                everything += curve
            if not few:
                _plot_mean(ax, everything)
            _set_axis(ax, ticks)
            ax.set_title(_title(panel))
            _format(ax.yaxis, panel)
        figure.supxlabel(path, fontsize=9)
        if 1 < len(lines) <= MOST_LINES:
            legend(figure, look)
        return svg(figure, name)


def pareto_front(rows: Sequence[SweepRow], names: Sequence[str]) -> str:
    """Draw a panel for each figure but the first, against the first. Points on the front are filled."""
    look = looks([row.policy for row in rows])
    first, *others = names
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.1 * len(others), 3.8), layout="constrained")
        for ax, other in zip(figure.subplots(1, len(others), squeeze=False)[0], others, strict=True):
            _scatter(ax, rows, first, other, look)
        legend(figure, look)
        return svg(figure, "pareto")


def against_quality(rows: Sequence[SweepRow], names: Sequence[str]) -> str:
    """Draw a panel for each figure against measured quality, of the points whose quality is known."""
    rows = [row for row in rows if row.figures["quality"] is not None]
    look = looks([row.policy for row in rows])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.1 * len(names), 3.8), layout="constrained")
        for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            _scatter(ax, rows, "quality", name, look)
        legend(figure, look)
        return svg(figure, "quality")


def _scatter(ax: Axes, rows: Sequence[SweepRow], x: str, y: str, look: Look) -> None:
    named: dict[tuple[float, float], list[str]] = {}
    for row in sorted(rows, key=lambda row: row.front):  # the front is drawn over the others
        here, there = row.figures.get(x), row.figures.get(y)
        if here is None or there is None:
            continue
        style = look[row.policy]
        face = style["color"] if row.front else "white"
        ax.scatter([here], [there], s=34, marker=style["marker"], facecolors=face, edgecolors=style["color"], zorder=3)
        if row.front:
            named.setdefault((here, there), []).append(str(row.number))
    for place, numbers in named.items():
        text = ", ".join(numbers[:MOST_NAMED]) + (" ..." if len(numbers) > MOST_NAMED else "")
        ax.annotate(text, place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    ax.set_xlabel(_title(x))
    ax.set_ylabel(_title(y))
    _format(ax.xaxis, x)
    _format(ax.yaxis, y)


def _plot_mean(ax: Axes, points: Sequence[tuple[float, float]]) -> None:
    at: dict[float, list[float]] = {}
    for x, y in sorted(points):
        at.setdefault(x, []).append(y)
    means = [math.fsum(values) / len(values) for values in at.values()]
    ax.plot(list(at), means, color=COLOURS[0], marker=MARKERS[0], markersize=4)


def _places(rows: Sequence[SweepRow], path: str) -> tuple[Callable[[SweepRow], float], dict[float, str]]:
    """Return where a row stands on the axis of a setting, and the ticks: its numbers, or one place after the other."""
    with_path = [row for row in rows if path in row.values]
    names = {row.values[path]: shown(row.settings[path]) for row in with_path}
    if all(isinstance(value, float) and math.isfinite(value) for value in names):
        return (lambda row: float(row.values[path])), {float(value): name for value, name in names.items()}
    order = {value: float(at) for at, value in enumerate(names)}
    return (lambda row: order[row.values[path]]), {order[value]: name for value, name in names.items()}


def _set_axis(ax: Axes, ticks: Mapping[float, str]) -> None:
    low, high = min(ticks), max(ticks)
    if low > 0 and high >= DECADES * low:
        ax.set_xscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
    if len(ticks) <= MOST_LINES:
        ax.set_xticks(list(ticks), list(ticks.values()), rotation=30 if max(map(len, ticks.values())) > 6 else 0)
    else:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def _format(axis: Axis, name: str) -> None:
    if name.startswith(RATES):
        axis.set_major_formatter(lambda rate, _: f"{rate:.0%}")
    elif "_bytes" in name:
        axis.set_major_formatter(EngFormatter("B"))


def _title(name: str) -> str:
    return f"{name}, seconds" if name.startswith(("ttft", "tpot", "e2e")) else name

"""Hit rate against capacity, a line for each order of eviction and lifetime, as a picture. Needs matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from warmkv.chart_style import COLOURS, INK, MARKERS, STYLE
from warmkv.faults import UserError
from warmkv.terminal import is_standard


class ChartError(UserError):
    """A chart that cannot be written as asked."""


Points = Sequence[tuple[float, float]]  # capacity or seconds, hit rate


def save(lines: Mapping[str, Points], marks: Mapping[str, Points], ceiling: float, axis: str, file: Path) -> None:
    """Draw lines and the points asked for, over the ceiling of an unlimited cache; `-` is SVG on standard output.

    Raises OSError, and ChartError for a kind of file that matplotlib does not know.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        kinds = figure.canvas.get_supported_filetypes()
        if file.suffix and file.suffix[1:].lower() not in kinds:
            raise ChartError(f"{file.suffix} is no kind of chart; there are {', '.join(sorted(kinds))}")
        axes = figure.subplots()
        axes.axhline(ceiling, color=INK, linewidth=0.9, linestyle="--", label=f"unlimited, {ceiling:.1%}")
        for at, (label, points) in enumerate(lines.items()):
            colour, marker = COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]
            axes.plot(*zip(*points, strict=True), color=colour, label=label)
            if asked := marks.get(label):
                axes.plot(*zip(*asked, strict=True), color=colour, marker=marker, linestyle="", markersize=4)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(0, min(1.0, 1.15 * ceiling) or 1.0)
        axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:.0%}")
        axes.set_xlabel(f"{axis} (log scale)")
        axes.set_ylabel("prompt tokens found")
        axes.legend(loc="best")
        if is_standard(file):
            figure.savefig(sys.stdout.buffer, format="svg", metadata={"Date": None})
            return
        figure.savefig(
            file, metadata={"Date": None} if file.suffix == ".svg" else None
        )  # the same input, the same file

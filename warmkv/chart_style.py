"""How charts look, in every report. Importable without matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any colour vision; markers repeat the distinction in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
INK, GRID = "#222222", "#DDDDDD"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched and read out
    "svg.hashsalt": "warmkv",  # the same figures give the same file
}

Look = Mapping[str, dict[str, Any]]
"""Colour, marker and line of each label."""

LETTERS = 12  # of a legend in an inch
MOST_NAMED = 20  # with more entries a legend says nothing


def looks(labels: Iterable[str], black: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return how each label is drawn, the same in all charts of a report; what others are compared with is black."""
    black = set(black)
    known = list(dict.fromkeys(labels))
    places = {label: at for at, label in enumerate(label for label in known if label not in black)}
    return {
        label: {
            "color": COLOURS[places[label] % len(COLOURS)],
            "marker": MARKERS[places[label] % len(MARKERS)],
            "linestyle": ("-", "--", ":")[places[label] // len(COLOURS) % 3],
        }
        if label in places
        else {"color": INK, "marker": "*", "linestyle": "--"}
        for label in known
    }


def legend(figure: Figure, look: Look) -> None:
    """Put a legend above a figure, in as many columns as its labels leave room for."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, markersize=5, linewidth=1.5, **style) for label, style in look.items()]
    columns = max(1, round(figure.get_figwidth() * LETTERS / (max(map(len, look), default=1) + 6)))
    figure.legend(handles=handles[:MOST_NAMED], loc="outside upper left", ncols=min(columns, len(handles) or 1))

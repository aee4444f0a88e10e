"""What every race hands over: figures with their targets, on screen and as one JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Direction = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A median over repeats; `spread` is the largest value minus the smallest.

    `value` is None where it could not be measured, `met` None where there is no target.
    """

    name: str
    value: float | None
    spread: float | None
    target: float | None
    direction: Direction
    met: bool | None


def figure(name: str, values: Sequence[float], target: float | None, direction: Direction) -> Figure:
    """Return the figure of some repeats. None at all is a miss, if there is a target."""
    if not values or not all(math.isfinite(value) for value in values):
        return Figure(name, None, None, target, direction, None if target is None else False)
    value = statistics.median(values)
    met = None
    if target is not None:
        met = value >= target if direction == "higher" else value <= target
    return Figure(name, value, max(values) - min(values), target, direction, met)


def ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Pair by pair, in the order of the repeats, as far as both sides were measured."""
    return [a / b for a, b in zip(these, those, strict=False)]


def document(
    machine: dict[str, Any],
    versions: dict[str, str],
    commit: str | None,
    settings: dict[str, Any],
    figures: Sequence[Figure],
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "machine": machine,
        "versions": versions,
        "commit": commit,
        "settings": settings,
        "figures": [asdict(each) for each in figures],
        "notes": list(notes),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def show(title: str, figures: Sequence[Figure], notes: Sequence[str]) -> None:
    """Print the table: by rich where it is installed, else plainly."""
    head = ("figure", "median", "spread", "target", "met")
    rows = [(each.name, _number(each.value), _number(each.spread), _target(each), _met(each)) for each in figures]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
        print(title)
        for row in [head, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    else:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for at, name in enumerate(head):
            table.add_column(name, justify="right" if at in (1, 2, 3) else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console = Console(highlight=False)
        console.width = max(console.width, 100)  # no name is cut in a narrow terminal
        console.print(table)
    for note in notes:
        print(f"note: {note}")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _target(each: Figure) -> str:
    if each.target is None:
        return ""
    return f"{'>=' if each.direction == 'higher' else '<='} {each.target:.4g}"


def _met(each: Figure) -> str:
    if each.target is None:
        return ""
    return "not measured" if each.value is None else "yes" if each.met else "NO"

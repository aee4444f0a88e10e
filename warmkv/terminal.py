"""The terminal: text is printed as it is, whatever it holds, and tables at their full width."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


class Terminal(Console):
    """A console without markup, emoji codes and highlighting: brackets in a file name or an error stay brackets.

    Colours are given as a style. Long lines are left to the terminal, so that they can be copied.
    """

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(stderr=stderr, file=file, markup=False, emoji=False, highlight=False, soft_wrap=True)


console = Terminal()
errors = Terminal(stderr=True)


def is_standard(file: str | Path) -> bool:
    """Return True for `-`, which names standard output, or standard input."""
    return str(file) == "-"


@contextmanager
def text_output(file: str | Path) -> Iterator[IO[str]]:
    """Open a text file to be written; `-` is standard output. Raises OSError."""
    if is_standard(file):
        yield sys.stdout
        sys.stdout.flush()
        return
    with Path(file).open("w", encoding="utf-8") as opened:
        yield opened


def json_text(document: object) -> str:
    """Return a document as JSON, with null for numbers that are not finite: JSON has no infinity."""
    try:
        return json.dumps(document, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_table(*heads: str, left: int = 1, gap: int = 3) -> Table:
    """Return a table without lines; the first `left` columns are text, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at < left else "right", no_wrap=True)
    return table


def ruled_table(title: str, *heads: str, caption: str = "", left: int = 1) -> Table:
    """Return a table with a title, a line under its heads and a caption."""
    table = Table(title=title or None, title_justify="left", caption=caption or None, caption_justify="left")
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at < left else "right", no_wrap=True)
    return table


def three_digits(number: float) -> str:
    """Format with three significant digits, more above 1000: at most five characters below 10,000."""
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def show_table(table: Table, to: Console = console) -> None:
    """Print a table at its full width: lines of a narrower terminal wrap rather than lose figures."""
    needed = Measurement.get(to, to.options.update(max_width=10_000), table).maximum
    before, to.width = to.width, max(to.width, needed)
    to.print(table)
    to.width = before


@contextmanager
def bar(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar where stderr is a terminal; yield what is told how much is done."""
    from rich.progress import Progress

    with Progress(*_columns(), console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task(description, total=total)
        yield lambda done: shown.update(task, completed=done)


@contextmanager
def steps(total: int, begun: int = 0) -> Iterator[Callable[[str, int], None]]:
    """Show a bar with the time that remains; yield what is told a step's name and the work done since the last."""
    from rich.progress import Progress, TimeRemainingColumn

    columns = (*_columns(width=36), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task("", total=total, completed=begun)
        yield lambda what, work: shown.update(task, advance=work, description=what)


def _columns(width: int = 0) -> tuple[ProgressColumn, ...]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    text = TextColumn(f"{{task.description:<{width}}}", markup=False)
    return text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()

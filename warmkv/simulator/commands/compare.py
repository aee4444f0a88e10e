"""`warmkv compare`: what changed between two runs. Imports when it runs, for instant help."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from warmkv.faults import UserError
from warmkv.simulator.commands.options import JsonOption, fail, write

if TYPE_CHECKING:
    from warmkv.simulator.studies.compare import Comparison, Effect

RunArgument = Annotated[
    str, typer.Argument(help="Folder of a run, or a point of a sweep as FOLDER:NUMBER.", show_default=False)
]


def compare(run_a: RunArgument, run_b: RunArgument, json_file: JsonOption = None) -> None:
    """Explain what changed from one run to another: settings that differ, then figures, the largest effects first.

    Examples: `warmkv compare runs/before runs/after`, `warmkv compare runs/sweep:1 runs/sweep:7 --json`
    """
    from warmkv.simulator.studies import compare as comparing

    try:
        result = comparing.compare(comparing.read(run_a), comparing.read(run_b))
    except UserError as error:
        fail("compare", str(error))
    document = json.dumps({"a": run_a, "b": run_b, **result.to_json()}, indent=2)
    if json_file == "-":
        print(document)
        return
    _show(run_a, run_b, result, Console())
    if json_file is not None:
        write(document, json_file, "compare")


def _show(a: str, b: str, result: Comparison, console: Console) -> None:
    from rich.table import Table

    console.print(f"from {a} to {b}\n", highlight=False, markup=False, soft_wrap=True)
    if not result.settings:
        print("the settings are the same")
    for path, (old, new) in result.settings.items():
        console.print(f"{path}: {_value(old)} → {_value(new)}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in ("before", "after", "change", ""):
        table.add_column(name, justify="right", no_wrap=True)
    changed = [effect for effect in result.effects if effect.a != effect.b]
    for effect in changed:
        table.add_row(escape(effect.name), _number(effect.a), _number(effect.b), _change(effect), _verdict(effect))
    print()
    console.print(table if changed else "no figure changed")
    if same := len(result.effects) - len(changed):
        print(f"\n{same} figures are the same")
    for run, names in ((a, result.only_a), (b, result.only_b)):
        if names:
            console.print(f"only {run} has {', '.join(names)}", highlight=False, markup=False, soft_wrap=True)


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.5g}"


def _change(effect: Effect) -> str:
    if effect.change is None:
        return "new" if not effect.a else "turned"
    return f"{effect.change:+.1%}" if effect.change < 10 else f"x {effect.change + 1:,.0f}"


def _verdict(effect: Effect) -> str:
    return "" if effect.better is None else "[green]better[/green]" if effect.better else "[red]worse[/red]"

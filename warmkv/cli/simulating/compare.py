"""`warmkv compare`: what changed between two runs. Imports when it runs, for instant help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from warmkv.cli.options import JsonOptions
from warmkv.terminal import console, plain_table, show_table

if TYPE_CHECKING:
    from warmkv.simulator.studies.sweeps.compare import Comparison, Effect

RunArgument = Annotated[
    str, typer.Argument(help="Folder of a run, or a point of a sweep as FOLDER:NUMBER.", show_default=False)
]


def compare(run_a: RunArgument, run_b: RunArgument, output: JsonOptions) -> None:
    """Explain what changed from one run to another: settings that differ, then figures, the largest effects first.

    Examples: `warmkv compare runs/before runs/after`, `warmkv compare runs/sweep:1 runs/sweep:7 --json`
    """
    from warmkv.simulator.studies.sweeps import compare as comparing

    result = comparing.compare(comparing.read(run_a), comparing.read(run_b))
    output.give({"a": run_a, "b": run_b, **result.to_json()}, lambda: _show(run_a, run_b, result))


def _show(a: str, b: str, result: Comparison) -> None:
    console.print(f"from {a} to {b}\n")
    if not result.settings:
        print("the settings are the same")
    for path, (old, new) in result.settings.items():
        console.print(f"{path}: {_value(old)} → {_value(new)}")
    table = plain_table("", "before", "after", "change", "")
    changed = [effect for effect in result.effects if effect.a != effect.b]
    for effect in changed:
        table.add_row(effect.name, _number(effect.a), _number(effect.b), _change(effect), _verdict(effect))
    print()
    if changed:
        show_table(table)
    else:
        print("no figure changed")
    if same := len(result.effects) - len(changed):
        print(f"\n{same} figures are the same")
    for run, names in ((a, result.only_a), (b, result.only_b)):
        if names:
            console.print(f"only {run} has {', '.join(names)}")


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.5g}"


def _change(effect: Effect) -> str:
    if effect.change is None:
        return "new" if not effect.a else "turned"
    return f"{effect.change:+.1%}" if effect.change < 10 else f"x {effect.change + 1:,.0f}"


def _verdict(effect: Effect) -> Text:
    if effect.better is None:
        return Text()
    return Text("better", style="green") if effect.better else Text("worse", style="red")

"""`warmkv tune`: the best settings within limits. Imports when it runs, for instant help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from warmkv.cli.command import no_standard_output, resumable
from warmkv.cli.options import JsonOptions, MachineOptions, QualityOption, ReplayOptions, SettingsOptions, WorkerOptions
from warmkv.cli.simulating.sweep import runner_of
from warmkv.extras import require
from warmkv.simulator.studies.sweeps import grid as grids
from warmkv.terminal import bar, console, plain_table, show_table

if TYPE_CHECKING:
    from warmkv.simulator.studies.sweeps.tune import Trial, TuneConstraint

ROOTS_NOT_TUNED = {
    "simulator": "it describes the machine, and is not a choice",
    grids.TTL: "it is no setting of the service; prefix_cache.default_ttl is",
}


def tune(
    source: ReplayOptions,
    minimize: Annotated[str, typer.Option(help="A figure of `warmkv sweep`, as in dollars.", show_default=False)],
    grid: Annotated[
        Path, typer.Option(help="YAML: a mapping of settings to the values to choose from.", show_default=False)
    ],
    machine: MachineOptions,
    running: WorkerOptions,
    output: JsonOptions,
    options: SettingsOptions,
    subject_to: Annotated[
        str, typer.Option(help="Limits on figures, as in `ttft_p99<2,quality>0.95`.", show_default="no limit")
    ] = "",
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the trials; one that holds this search is continued.", callback=no_standard_output
        ),
    ] = Path("runs/tune"),
    trials: Annotated[int, typer.Option(min=1, help="Most choices to try; a space no larger is tried in full.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="The same seed tries the same choices.")] = 0,
    quality: QualityOption = None,
) -> None:
    """Search for the settings with the least of a figure within limits on others, and print how to apply them.

    They refuse no more requests than the present settings, unless `refused` is limited or minimized. Exits 1 if nothing
    that was tried is within the limits.

    Example: `warmkv tune access.jsonl --minimize resident_bytes_max --subject-to "ttft_p99<2" --grid space.yaml`
    """
    options = options.under(*machine.flags())
    base = options.read()

    def configured(settings: dict[str, Any]) -> grids.GridPoint:
        return grids.point(settings, lambda flags: options.read(*flags))

    axes = grids.read_axes(grid)
    for path in axes:
        root = path.split(".")[0]
        if root in ROOTS_NOT_TUNED:
            raise grids.GridError(f"{path}: {ROOTS_NOT_TUNED[root]}")
    alone = [configured({path: value}) for path, values in axes.items() for value in values]

    from warmkv.simulator.studies.sweeps import sweep as sweeping
    from warmkv.simulator.studies.sweeps import sweep_quality
    from warmkv.simulator.studies.sweeps import tune as tuning
    from warmkv.simulator.studies.sweeps.sweep_folder import SweepFolder

    if tuning.size_of(axes) > trials:
        require("trying fewer choices than there are (--trials)", "optuna")
    if quality is not None:
        require("--quality", "pyarrow")
    requests = source.read(base)
    with resumable(out):
        known = sweeping.known_figures(point.config for point in alone)
        tuning.check_figure("--minimize", minimize, known)
        limits = tuning.constraints_of(subject_to, known)
        measured = sweep_quality.read(quality) if quality is not None else {}
        prompts = sweeping.prompt_lengths(requests.requests)
        folder = SweepFolder(out, sweeping.meta_of(requests, base, machine.step_times.value, False))
        most = min(trials, tuning.size_of(axes))
        unfit: dict[str, dict[str, Any]] = {}
        step_times: dict[str, None] = {}
        with runner_of(running, requests, base, most) as runner, bar("tuning", most + 1) as progress:

            def evaluate(choices: Sequence[dict[str, Any]]) -> list[dict[str, float | None]]:
                points = [configured(settings) for settings in choices]
                tasks = sweeping.tasks_of(points, requests, base, machine.step_times.value, False, alone)
                step_times.update(dict.fromkeys(sweeping.step_times_of(tasks)))
                unfit.update(
                    {
                        one.key: {"settings": of.settings, "why": one.unfit}
                        for one, of in zip(tasks, points, strict=True)
                        if one.unfit
                    }
                )
                results = sweeping.sweep(points, tasks, folder, runner)
                return [row.figures for row in sweeping.rows_of(points, tasks, results, measured, prompts)]

            (before,) = evaluate([{}])
            limits = tuning.refusing_no_more(limits, minimize, before)
            found = tuning.search(axes, evaluate, minimize, limits, trials=trials, seed=seed, progress=progress)
    best = tuning.best_of(found, minimize)
    document: dict[str, Any] = {
        "minimize": minimize,
        "subject_to": [limit.text for limit in limits],
        "before": before,
        "improves": best is not None and tuning.improves(best, before, minimize, limits),
        "best": best and {"settings": best.settings, "figures": best.figures},
        "trials": [trial.to_json() for trial in found],
        "unfit": list(unfit.values()),
        "step_times": list(step_times),
    }
    chosen = best or tuning.nearest_of(found)
    size, improves = tuning.size_of(axes), document["improves"]

    def show() -> None:
        for said in step_times:
            print(f"step times: {said}")
        for one in unfit.values():
            print(f"not replayed, {grids.label(one['settings'])}: {one['why']}")
        _show(chosen, before, minimize, limits, len(found), size, improves=improves)

    output.give(document, show)
    raise typer.Exit(0 if best else 1)


def _show(
    chosen: Trial,
    before: dict[str, float | None],
    minimize: str,
    limits: Sequence[TuneConstraint],
    tried: int,
    size: int,
    *,
    improves: bool,
) -> None:
    from warmkv.simulator.studies.sweeps.figures import serves_none

    print(f"tried {tried:,} of {size:,} choices")
    if serves_none(before):
        print("under the present settings no request is served: nothing can be compared with them")
    if not chosen.met:
        print(f"none is within the limits ({', '.join(limit.text for limit in limits)}); the nearest:")
    elif not improves and not serves_none(before):
        print("the present settings are as good as any of them:")
    table = plain_table("", "before", "after", "limit")
    for name in dict.fromkeys([minimize, *(limit.name for limit in limits)]):
        bounds = ", ".join(f"{limit.sign} {limit.bound:g}" for limit in limits if limit.name == name)
        table.add_row(name, _number(before.get(name)), _number(chosen.figures.get(name)), bounds)
    show_table(table)
    for limit in limits:
        if chosen.figures.get(limit.name) is None:
            why = "no measured results of its policy were given (--quality)" if limit.name == "quality" else "unknown"
            print(f"{limit.text} cannot be checked: {why}")
    if not improves:
        return
    flags = " ".join(f"--set '{path}={grids.shown(value)}'" for path, value in chosen.settings.items())
    print(f"\n{yaml.safe_dump(_tree(chosen.settings), sort_keys=False)}")
    print(
        "To apply it, put this into the file that `warmkv serve --config` reads; on Kubernetes into the overlay's\n"
        "warmkv.yaml, then run `make manifests` and apply the overlay. To try it first:"
    )
    console.print(f"warmkv serve {flags}")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.5g}"


def _tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Return dotted paths as nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree

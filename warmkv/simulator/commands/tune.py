"""`warmkv tune`: the best settings within limits. Imports when it runs, for instant help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console

from warmkv.config import load
from warmkv.faults import UserError
from warmkv.simulator.commands.options import (
    BlockSizeOption,
    CharactersOption,
    ConfigOption,
    FormatOption,
    GpuOption,
    JsonOption,
    ModelOption,
    OpenOption,
    Scope,
    ScopeOption,
    SetOption,
    StepTimes,
    StrictOption,
    TraceArgument,
    bar,
    errors,
    fail,
    machine,
    read_config,
    read_requests,
    write,
)
from warmkv.simulator.commands.sweep import runner_of
from warmkv.simulator.studies import grid as grids

if TYPE_CHECKING:
    from warmkv.simulator.studies.tune import Constraint, Trial

ROOTS_NOT_TUNED = {
    "simulator": "it describes the machine, and is not a choice",
    grids.TTL: "it is no setting of the service; prefix_cache.default_ttl is",
}


def tune(
    trace: TraceArgument,
    minimize: Annotated[str, typer.Option(help="A figure of `warmkv sweep`, as in dollars.", show_default=False)],
    grid: Annotated[
        Path, typer.Option(help="YAML: a mapping of settings to the values to choose from.", show_default=False)
    ],
    subject_to: Annotated[
        str, typer.Option(help="Limits on figures, as in `ttft_p99<2,quality>0.95`.", show_default="no limit")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of the trials; one that holds this search is continued.")] = Path(
        "runs/tune"
    ),
    trials: Annotated[int, typer.Option(min=1, help="Most choices to try; a space no larger is tried in full.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="The same seed tries the same choices.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, or Ray actors.", show_default="one per core")
    ] = None,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="On the running Ray cluster that RAY_ADDRESS names, or this machine's.")
    ] = False,
    quality: Annotated[
        Path | None, typer.Option(help="results.parquet of `warmkv eval`; without it quality is unknown.")
    ] = None,
    step_times: Annotated[
        StepTimes, typer.Option(help="Where step times come from, as in `warmkv replay`.")
    ] = StepTimes.AUTO,
    gpu: GpuOption = None,
    model: ModelOption = None,
    json_file: JsonOption = None,
    open_loop: OpenOption = False,
    scope: ScopeOption = Scope.GLOBAL,
    format: FormatOption = None,
    block_size: BlockSizeOption = None,
    characters_per_token: CharactersOption = None,
    strict: StrictOption = False,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 (Typer copies it)
) -> None:
    """Search for the settings with the least of a figure within limits on others, and print how to apply them.

    Exits 1 if nothing that was tried is within the limits.

    Example: `warmkv tune access.jsonl --minimize resident_bytes_max --subject-to "ttft_p99<2" --grid space.yaml`
    """
    set_ = [*machine(gpu, model), *set_]
    base = read_config(config, set_)

    def configured(settings: dict[str, Any]) -> grids.GridPoint:
        return grids.point(settings, lambda flags: load(config, flags=[*set_, *flags]))

    try:
        axes = grids.read_axes(grid)
        for path in axes:
            root = path.split(".")[0]
            if root in ROOTS_NOT_TUNED:
                raise grids.GridError(f"{path}: {ROOTS_NOT_TUNED[root]}")
        alone = [configured({path: value}) for path, values in axes.items() for value in values]
    except grids.GridError as error:
        fail("tune", str(error))

    from warmkv.simulator.studies import sweep as sweeping
    from warmkv.simulator.studies import sweep_quality
    from warmkv.simulator.studies import tune as tuning
    from warmkv.simulator.studies.sweep_folder import SweepFolder
    from warmkv.simulator.workload.source import Source

    if tuning.size_of(axes) > trials and find_spec("optuna") is None:
        fail("tune", "optuna missing; install with: pip install 'warmkv[tune]', or raise --trials to try everything")
    if quality is not None and find_spec("pyarrow") is None:
        fail("tune", "--quality needs pyarrow: pip install 'warmkv[eval]'")
    source = Source(trace, format, block_size, characters_per_token, scope.value, open_loop, strict)
    requests = read_requests("tune", source, base)
    try:
        known = sweeping.known_figures(point.config for point in alone)
        tuning.check_figure("--minimize", minimize, known)
        limits = tuning.constraints_of(subject_to, known)
        measured = sweep_quality.read(quality) if quality is not None else {}
        prompts = sweeping.prompt_lengths(requests.requests)
        folder = SweepFolder(out, sweeping.meta_of(requests, base, step_times.value, False))
        most = min(trials, tuning.size_of(axes))
        with runner_of("tune", requests, base, on_ray, workers, most) as runner, bar("tuning", most + 1) as progress:

            def evaluate(choices: Sequence[dict[str, Any]]) -> list[dict[str, float | None]]:
                points = [configured(settings) for settings in choices]
                tasks = sweeping.tasks_of(points, requests, base, step_times.value, False)
                results = sweeping.sweep(points, tasks, folder, runner)
                return [row.figures for row in sweeping.rows_of(points, tasks, results, measured, prompts)]

            (before,) = evaluate([{}])
            found = tuning.search(axes, evaluate, minimize, limits, trials=trials, seed=seed, progress=progress)
    except UserError as error:
        fail("tune", str(error))
    except OSError as error:
        fail("tune", f"cannot use {error.filename or out}: {error.strerror or error}")
    except KeyboardInterrupt:
        errors.print(f"interrupted; the same command goes on with what is in {out}", highlight=False, markup=False)
        raise typer.Exit(130) from None
    best = tuning.best_of(found, minimize)
    document = json.dumps(
        {
            "minimize": minimize,
            "subject_to": [limit.text for limit in limits],
            "before": before,
            "best": best and {"settings": best.settings, "figures": best.figures},
            "trials": [trial.to_json() for trial in found],
        },
        indent=2,
    )
    if json_file == "-":
        print(document)
    else:
        chosen = best or tuning.nearest_of(found)
        _show(chosen, before, minimize, limits, len(found), tuning.size_of(axes), Console())
        if json_file is not None:
            write(document, json_file, "tune")
    raise typer.Exit(0 if best else 1)


def _show(
    chosen: Trial,
    before: dict[str, float | None],
    minimize: str,
    limits: Sequence[Constraint],
    tried: int,
    size: int,
    console: Console,
) -> None:
    from rich.table import Table

    print(f"tried {tried:,} of {size:,} choices")
    if not chosen.met:
        print(f"none is within the limits ({', '.join(limit.text for limit in limits)}); the nearest:")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for at, head in enumerate(("", "before", "after", "limit")):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    for name in dict.fromkeys([minimize, *(limit.name for limit in limits)]):
        bounds = ", ".join(f"{limit.sign} {limit.bound:g}" for limit in limits if limit.name == name)
        table.add_row(name, _number(before.get(name)), _number(chosen.figures.get(name)), bounds)
    console.print(table)
    flags = " ".join(f"--set '{path}={grids.shown(value)}'" for path, value in chosen.settings.items())
    print(f"\n{yaml.safe_dump(_tree(chosen.settings), sort_keys=False)}")
    print(
        "To apply it, put this into the file that `warmkv serve --config` reads; on Kubernetes into the overlay's\n"
        "warmkv.yaml, then run `make manifests` and apply the overlay. To try it first:"
    )
    console.print(f"warmkv serve {flags}", highlight=False, markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.5g}"


def _tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted paths as nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree

"""`warmkv sweep`: a trace under many settings. Imports when it runs, for instant help."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from warmkv.config import Config, load
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
from warmkv.simulator.studies import grid as grids

if TYPE_CHECKING:
    from warmkv.simulator.studies.sweep import Runner
    from warmkv.simulator.workload.source import Trace

FRONT = "dollars,hit_rate_tokens,ttft_p99"


def sweep(
    trace: TraceArgument,
    grid: Annotated[
        Path, typer.Option(help="YAML: a mapping of settings to values, or a list of points.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results; one that holds this sweep is continued.")] = Path(
        "runs/sweep"
    ),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, or Ray actors.", show_default="one per core")
    ] = None,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="On the running Ray cluster that RAY_ADDRESS names, or this machine's.")
    ] = False,
    front: Annotated[str, typer.Option(help="Figures of the Pareto front, the cost first.")] = FRONT,
    quality: Annotated[
        Path | None, typer.Option(help="results.parquet of `warmkv eval`; without it quality is unknown.")
    ] = None,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="Keep each request's own policy instead of compression.policy.")
    ] = False,
    step_times: Annotated[
        StepTimes, typer.Option(help="Where step times come from, as in `warmkv replay`.")
    ] = StepTimes.AUTO,
    gpu: GpuOption = None,
    model: ModelOption = None,
    max_points: Annotated[int, typer.Option(min=1, help="Refuse a grid of more points.")] = grids.MAX_POINTS,
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
    """Replay a trace at every point of a grid of settings: hit rate, cost, memory and latency, and the Pareto front.

    Writes `results.parquet`, `results.json` and `report.html`. Run the same again to continue what was interrupted, or
    with a larger grid to add to it.

    Example: `warmkv sweep access.jsonl --grid grid.yaml --out runs/ttl`, where grid.yaml has
    `prefix_cache.memory_bytes: [1GiB, 4GiB]` and `ttl: [5m, 1h]`
    """
    if missing := [name for name in ("pyarrow", "matplotlib") if find_spec(name) is None]:
        fail("sweep", f"{', '.join(missing)} missing; install with: pip install 'warmkv[eval]'")
    set_ = [*machine(gpu, model), *set_]
    base = read_config(config, set_)
    try:
        settings = grids.read(grid, max_points)
        points = [grids.point(one, lambda flags: load(config, flags=[*set_, *flags])) for one in settings]
    except grids.GridError as error:
        fail("sweep", str(error))
    if as_recorded and any(path.startswith("compression.policy") for one in settings for path in one):
        fail("sweep", "--as-recorded keeps each request's own policy, but the grid varies compression.policy")

    from warmkv.simulator.reports import sweep_page
    from warmkv.simulator.studies import sweep as sweeping
    from warmkv.simulator.studies import sweep_quality
    from warmkv.simulator.studies.sweep_folder import SweepFolder
    from warmkv.simulator.workload.source import Source

    source = Source(trace, format, block_size, characters_per_token, scope.value, open_loop, strict)
    requests = read_requests("sweep", source, base)
    axes = [name.strip() for name in front.split(",") if name.strip()]
    try:
        sweeping.check_axes(axes, sweeping.known_figures(point.config for point in points))
        measured = sweep_quality.read(quality) if quality is not None else {}
        tasks = sweeping.tasks_of(points, requests, base, step_times.value, as_recorded)
        folder = SweepFolder(out, sweeping.meta_of(requests, base, step_times.value, as_recorded))
        running = runner_of("sweep", requests, base, on_ray, workers, len(points))
        with bar("sweeping", len(points)) as progress, running as runner:
            results = sweeping.sweep(points, tasks, folder, runner, progress)
        prompts = sweeping.prompt_lengths(requests.requests)
        rows = sweeping.with_front(sweeping.rows_of(points, tasks, results, measured, prompts), axes)
        idle = sweeping.without_effect(rows)
        document = json.dumps(
            {"meta": folder.meta, "front": axes, "without_effect": idle, "points": [row.to_json() for row in rows]},
            indent=2,
        )
        folder.write("results.json", document + "\n")
        sweep_page.write_parquet(rows, out / "results.parquet")
        folder.write("report.html", sweep_page.render(folder.meta, rows, axes, idle))
    except UserError as error:
        fail("sweep", str(error))
    except OSError as error:
        fail("sweep", f"cannot use {error.filename or out}: {error.strerror or error}")
    except KeyboardInterrupt:
        errors.print(f"interrupted; the same command goes on with what is in {out}", highlight=False, markup=False)
        raise typer.Exit(130) from None
    if json_file == "-":
        print(document)
        return
    console = Console()
    sweep_page.show(rows, axes, idle, console)
    console.print(f"{out}/report.html", highlight=False, markup=False, soft_wrap=True)
    if json_file is not None:
        write(document, json_file, "sweep")


def runner_of(
    what: str, trace: Trace, base: Config, on_ray: bool, workers: int | None, points: int
) -> AbstractContextManager[Runner]:
    """Choose the runner of points: on Ray, in processes, or in this process where that is enough."""
    from warmkv.simulator.studies import sweep as sweeping

    if on_ray:
        if find_spec("ray") is None:
            fail(what, "--ray needs Ray; install with: pip install 'warmkv[serve]'")
        from warmkv.simulator.studies import sweep_ray

        return sweep_ray.on_ray(trace.requests, min(workers or points, points))
    count = min(workers or os.cpu_count() or 1, points)
    if count == 1:
        return nullcontext(sweeping.serial(trace.requests))
    return sweeping.processes(trace, base, count)

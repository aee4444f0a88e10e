"""`warmkv sweep`: a trace under many settings. Imports when it runs, for instant help."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warmkv.cli.command import fail, no_standard_output, resumable
from warmkv.cli.options import JsonOptions, MachineOptions, QualityOption, ReplayOptions, SettingsOptions, WorkerOptions
from warmkv.config import Config
from warmkv.extras import require
from warmkv.simulator.studies.sweeps import grid as grids
from warmkv.terminal import bar, console, json_text

if TYPE_CHECKING:
    from warmkv.simulator.studies.sweeps.sweep import Runner
    from warmkv.simulator.workload.source import LoadedTrace

FRONT = "dollars,hit_rate_tokens,ttft_p99"


def sweep(
    source: ReplayOptions,
    grid: Annotated[
        Path, typer.Option(help="YAML: a mapping of settings to values, or a list of points.", show_default=False)
    ],
    machine: MachineOptions,
    running: WorkerOptions,
    output: JsonOptions,
    options: SettingsOptions,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the results; one that holds this sweep is continued.", callback=no_standard_output
        ),
    ] = Path("runs/sweep"),
    front: Annotated[
        str, typer.Option(help="Figures of the Pareto front, the cost first; refused is one where it differs.")
    ] = FRONT,
    quality: QualityOption = None,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="Keep each request's own policy instead of compression.policy.")
    ] = False,
    max_points: Annotated[int, typer.Option(min=1, help="Refuse a grid of more points.")] = grids.MAX_POINTS,
) -> None:
    """Replay a trace at every point of a grid of settings: hit rate, cost, memory and latency, and the Pareto front.

    Writes `results.parquet`, `results.json` and `report.html`. Run the same again to continue what was interrupted, or
    with a larger grid to add to it.

    Example: `warmkv sweep access.jsonl --grid grid.yaml --out runs/ttl`, where grid.yaml has
    `prefix_cache.memory_bytes: [1GiB, 4GiB]` and `ttl: [5m, 1h]`
    """
    require("a sweep", "pyarrow", "matplotlib")
    options = options.under(*machine.flags())
    base = options.read()
    settings = grids.read(grid, max_points)
    points = [grids.point(one, lambda flags: options.read(*flags)) for one in settings]
    if as_recorded and any(path.startswith("compression.policy") for one in settings for path in one):
        fail("--as-recorded keeps each request's own policy, but the grid varies compression.policy")

    from warmkv.simulator.reports import sweep_page
    from warmkv.simulator.studies.sweeps import sweep as sweeping
    from warmkv.simulator.studies.sweeps import sweep_quality
    from warmkv.simulator.studies.sweeps.sweep_folder import SweepFolder

    requests = source.read(base)
    axes = [name.strip() for name in front.split(",") if name.strip()]
    with resumable(out):
        sweeping.check_axes(axes, sweeping.known_figures(point.config for point in points))
        measured = sweep_quality.read(quality) if quality is not None else {}
        tasks = sweeping.tasks_of(points, requests, base, machine.step_times.value, as_recorded)
        folder = SweepFolder(out, sweeping.meta_of(requests, base, machine.step_times.value, as_recorded))
        with bar("sweeping", len(points)) as progress, runner_of(running, requests, base, len(points)) as runner:
            results = sweeping.sweep(points, tasks, folder, runner, progress)
        step_times = sweeping.step_times_of(tasks)
        prompts = sweeping.prompt_lengths(requests.requests)
        rows = sweeping.rows_of(points, tasks, results, measured, prompts)
        axes = sweeping.with_refusals(axes, rows)
        rows = sweeping.with_front(rows, axes)
        idle = sweeping.without_effect(rows)
        document = {
            "meta": folder.meta,
            "front": axes,
            "without_effect": idle,
            "step_times": step_times,
            "points": [row.to_json() for row in rows],
        }
        folder.write("results.json", json_text(document) + "\n")
        sweep_page.write_parquet(rows, out / "results.parquet")
        folder.write("report.html", sweep_page.render(folder.meta, rows, axes, idle, step_times))

    def show() -> None:
        sweep_page.show(rows, axes, idle, console)
        for said in step_times:
            console.print(f"step times: {said}")
        console.print(f"{out}/report.html")

    output.give(document, show)


def runner_of(asked: WorkerOptions, trace: LoadedTrace, base: Config, points: int) -> AbstractContextManager[Runner]:
    """Return what replays points: on Ray, in processes, or in this one where that is enough.

    Processes read the trace anew, so one that came through a pipe is replayed in this one.
    """
    from warmkv.simulator.studies.sweeps import sweep as sweeping
    from warmkv.simulator.traces.files import is_stored

    if asked.on_ray:
        require("--ray", "ray")
        from warmkv.simulator.studies.sweeps import sweep_ray

        return sweep_ray.on_ray(trace.requests, min(asked.workers or points, points))
    count = min(asked.workers or os.cpu_count() or 1, points) if is_stored(trace.source.path) else 1
    if count == 1:
        return nullcontext(sweeping.serial(trace.requests))
    return sweeping.processes(trace, base, count)

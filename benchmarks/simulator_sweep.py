"""A sweep of 200 configurations over the conversation trace, in one process and in one for every core.

Cores of one machine share its power, caches and memory, and virtual ones perhaps a core: two programs that have nothing
to do with each other do not run twice as fast as one. So the sweep in many processes is held against as many
replays by themselves at the same time, of the same configurations. Part of `simulator_race`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

from warmkv.config import Config, load, parse
from warmkv.simulator.studies.sweeps.grid import GridPoint, point
from warmkv.simulator.studies.sweeps.sweep import Runner, SweepTask, processes, serial, tasks_of
from warmkv.simulator.workload.source import LoadedTrace, Source, read

if TYPE_CHECKING:
    from benchmarks.report import Figure

GRID: dict[str, list[Any]] = {
    "ttl": ["1m", "5m", "15m", "1h", "unlimited"],
    "prefix_cache.memory_bytes": ["64GiB", "128GiB", "256GiB", "384GiB", "512GiB"],
    "engine.step_tokens": [1024, 2048, 4096, 8192],
    "compression.policy": ["full", "snapkv@0.2"],
}
RATE = 30_000.0  # requests a second of each process, as for a replay by itself
SHARE = 0.9  # of what as many processes do that share nothing: those of a sweep start, read the trace and report
FEW = 8  # points and requests / 100 that show whether it runs


def race(trace: Path, flags: Sequence[str], quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """Return requests a second over all points, and how much faster as many processes as there are cores do them."""
    from benchmarks.report import figure

    base = load(flags=flags, environ={})
    points = list(islice(_points(flags), FEW if quick else None))
    with _beginning(trace, FEW * 100 if quick else None) as path:
        source = read(Source(path), base)
        tasks = tasks_of(points, source, base, "config", as_recorded=False)
        count, workers = len(source.requests.records) * len(tasks), os.cpu_count() or 1
        alone = _seconds(serial(source.requests), tasks)
        say(f"sweep: {len(tasks)} configurations in {alone:.1f} s, one after the other")
        begin = time.perf_counter()
        with processes(source, base, workers) as runner:
            _seconds(runner, tasks)
        together = time.perf_counter() - begin
        say(f"sweep: in {together:.1f} s, in {workers} processes")
        apart = _apart(source, base, tasks, workers)
        say(f"sweep: {workers} processes that share nothing would take {apart:.1f} s without their start")
    return [
        figure("requests_per_second_sweep", [count / alone], RATE, "higher"),
        figure("speed_up_per_process_sweep", [alone / together / workers], None, "higher"),
        figure("speed_up_per_process_apart", [alone / apart / workers], None, "higher"),
        figure("share_of_processes_apart_sweep", [apart / together], SHARE, "higher"),
    ]


def _apart(trace: LoadedTrace, base: Config, tasks: Sequence[SweepTask], workers: int) -> float:
    """Return seconds in which processes that do nothing but replay, side by side, do the tasks at their joint rate."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(workers, mp_context=context) as pool:
        own = partial(_rate, trace.source, base.model_dump_json(), manager.Barrier(workers))
        return len(tasks) / sum(pool.map(own, [tasks[number::workers] for number in range(workers)]))


def _rate(source: Source, base: str, ready: Barrier, tasks: Sequence[SweepTask]) -> float:
    """Return tasks a second in a process by itself, once all have read the trace."""
    runner = serial(read(source, parse(json.loads(base))).requests)
    ready.wait()
    return len(tasks) / _seconds(runner, tasks)


def _points(flags: Sequence[str]) -> Iterator[GridPoint]:
    def configure(own: Sequence[str]) -> Config:
        return load(flags=[*flags, *own], environ={})

    return (point(dict(zip(GRID, values, strict=True)), configure) for values in product(*GRID.values()))


def _seconds(runner: Runner, tasks: Sequence[SweepTask]) -> float:
    begin = time.perf_counter()
    done = sum(1 for _ in runner(tasks))
    assert done == len(tasks)
    return time.perf_counter() - begin


@contextmanager
def _beginning(trace: Path, lines: int | None) -> Iterator[Path]:
    """Yield the trace, or a file of its first lines."""
    if lines is None:
        yield trace
        return
    with tempfile.TemporaryDirectory() as folder, trace.open() as whole:
        part = Path(folder) / trace.name
        part.write_text("".join(islice(whole, lines)))
        yield part

"""Replaying a trace at every point of a grid: in this process, in one per core, or on Ray. The results are the same."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from pydantic import ByteSize

from warmkv import __version__
from warmkv.config import Config
from warmkv.simulator.cluster.memory import KV_BYTES, STORED_BYTES, gpus_per_replica, why_unfit
from warmkv.simulator.steps.costs import StepCost, StepTimes
from warmkv.simulator.studies.pareto import front
from warmkv.simulator.studies.replays import step_times
from warmkv.simulator.studies.replays.replay import recorded_policy, replay
from warmkv.simulator.studies.replays.summary import figures
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.studies.sweeps import sweep_quality
from warmkv.simulator.studies.sweeps.figures import Figures, sense, served_figures
from warmkv.simulator.studies.sweeps.grid import GridPoint, digest
from warmkv.simulator.studies.sweeps.replays import Replays
from warmkv.simulator.studies.sweeps.sweep_folder import SweepError, SweepFolder
from warmkv.simulator.studies.sweeps.sweep_quality import Quality
from warmkv.simulator.workload.requests import Requests
from warmkv.simulator.workload.source import LoadedTrace, Source, file_digest, read

Times = Literal["auto", "config", "log"]
STEP_SETTINGS = ("profile", "step_a", "step_b", "step_c", "overhead_seconds")


@dataclass(frozen=True, slots=True)
class SweepTask:
    """A point as a worker gets it: no files are needed beside the trace."""

    key: str
    label: str
    config: Config
    variant: Variant
    times: StepTimes
    step_times: tuple[str, ...] = ()  # where they come from, and what is to be said of them
    unfit: str = ""  # why it cannot be replayed: a replica does not fit its GPU


Runner = Callable[[Sequence[SweepTask]], Iterator[tuple[SweepTask, Figures]]]
"""Does tasks and yields each with its figures, in any order."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A point and its figures."""

    number: int  # from 1, in the order of the grid
    key: str
    settings: dict[str, Any]  # as written
    values: dict[str, float | str]  # what they mean: bytes, seconds, labels
    policy: str
    figures: dict[str, float | None]  # None: unknown
    front: bool = False  # nothing else is better on every axis
    unfit: str = ""  # why there are no figures

    def to_json(self) -> dict[str, Any]:
        """Return JSON with null for unlimited: JSON has no infinity."""
        finite = {path: None if value == math.inf else value for path, value in self.values.items()}
        return {**asdict(self), "values": finite}


# --- what is to be done -----------------------------------------------------------------------------------------


def meta_of(trace: LoadedTrace, base: Config, source: Times, as_recorded: bool) -> dict[str, Any]:
    """Return the figures that must agree for points to belong together."""
    profile = base.simulator.profile
    return {
        "trace": {"file": trace.source.path.name, "sha256": trace.sha256, "requests": len(trace.requests.records)},
        "reading": trace.source.to_json(),
        "config": base.model_dump(mode="json"),
        "step_times": {"source": source, "profile": file_digest(profile) if profile else None},
        "as_recorded": as_recorded,
        "warmkv": __version__,
    }


def tasks_of(
    points: Sequence[GridPoint],
    trace: LoadedTrace,
    base: Config,
    source: Times,
    as_recorded: bool,
    others: Sequence[GridPoint] = (),
) -> list[SweepTask]:
    """Make a task for every point; its policy is that of the point's configuration, unless `as_recorded`.

    Step times are chosen once, since a fit to the log needs the settings it was recorded with; but where points differ
    in them, these or `others` with which they are compared, each has its own. Raises UserError as
    `step_times.choose_cost` does, SweepError if both are asked for.
    """
    own = any(_has_own_times(point.config, base) for point in (*points, *others))
    if own and source == "log":
        raise SweepError("the grid varies step times, and --step-times log takes them from the log")
    known: dict[Any, tuple[StepTimes, str]] = {}
    tasks = []
    for point in points:
        config = point.config if own else _as_recorded(base, point.config)
        chosen = _step_settings(config) if own else _groups_but_for_size(config)
        if chosen not in known:
            where: Times = "config" if own else source
            known[chosen] = step_times.choose_cost(trace.requests.records, config, recorded_policy(), where)
        times, origin = known[chosen]
        key = digest(point.settings, *([_own_times(point.config)] if own else []))
        variant = Variant(point.ttl, None if as_recorded else point.config.compression.policy)
        stand_ins = [] if variant.policy is None else step_times.stand_ins(times, [variant.policy])
        unfit = why_unfit(point.config)
        crowding = "" if unfit else step_times.crowding(point.config)
        said = (origin, *(f"not measured: {one}" for one in stand_ins), *([crowding] if crowding else []))
        tasks.append(SweepTask(key, point.label, point.config, variant, times, said, unfit))
    return tasks


def step_times_of(tasks: Iterable[SweepTask]) -> list[str]:
    """Return where the step times of tasks come from and what is to be said of them, each once."""
    return list(dict.fromkeys(said for task in tasks for said in task.step_times))


def _as_recorded(base: Config, config: Config) -> Config:
    """Return the settings of a log with the groups of others; those that the log may have are as there."""
    groups = {name: base.cluster.groups.get(name, tree) for name, tree in config.cluster.groups.items()}
    return base.model_copy(update={"cluster": base.cluster.model_copy(update={"groups": groups})})


def _groups_but_for_size(config: Config) -> str:
    """Name the groups and their settings but for those of the cluster: replicas change no step time."""
    groups = config.cluster.groups.items()
    return digest({name: {part: of for part, of in tree.items() if part != "cluster"} for name, tree in groups})


def _own_times(config: Config) -> str:
    """Return the contents of the files that a point's own step times come from, which tell it apart."""

    def of(group: Config) -> str:
        profile, model = group.simulator.profile, group.simulator.model
        return file_digest(profile) if profile else model.model_dump_json() if model.is_whole else "settings"

    return ",".join(map(of, config.groups().values()))


def _has_own_times(config: Config, base: Config) -> bool:
    """Return True if settings differ in what step times come from; a group that the base lacks begins as its others."""
    known = dict(_step_settings(base))
    return any(found != known.get(name, known[""]) for name, found in _step_settings(config))


def _step_settings(config: Config) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    def of(group: Config) -> tuple[Any, ...]:
        simulator = group.simulator
        found = tuple(getattr(simulator, name) for name in STEP_SETTINGS)
        if simulator.model.is_whole:
            found += (simulator.model, simulator.gpu, gpus_per_replica(group))
        return found

    return tuple((name, of(group)) for name, group in config.groups().items())


# --- doing it ---------------------------------------------------------------------------------------------------


def serial(requests: Requests) -> Runner:
    """Run in this process, one after the other."""
    replays = Replays(requests)
    return lambda tasks: ((task, replays.figures(task)) for task in tasks)


@contextmanager
def processes(trace: LoadedTrace, base: Config, workers: int) -> Iterator[Runner]:
    """Run in `workers` processes of this machine. Each reads the trace once."""
    # Spawned, since a fork would copy the threads' locks of whoever calls. Ctrl-C ends the workers without a word.
    context, default = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_DFL)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=signal.signal, initargs=default)
    source = (replace(trace.source, path=trace.source.path.resolve()), trace.sha256, pickle.dumps(base))

    def run(tasks: Sequence[SweepTask]) -> Iterator[tuple[SweepTask, Figures]]:
        try:
            running = {pool.submit(_run_in_worker, *source, task): task for task in tasks}
            for done in as_completed(running):
                yield running[done], done.result()
        except BrokenProcessPool:
            raise SweepError("a worker was killed, perhaps for want of memory; try fewer --workers") from None

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


def _run_in_worker(source: Source, sha256: str, base: bytes, task: SweepTask) -> Figures:
    return _replays(source, sha256, base).figures(task)


@lru_cache(maxsize=1)
def _replays(source: Source, sha256: str, base: bytes) -> Replays:
    """Read the trace once in a worker process, for its first point."""
    trace = read(source, pickle.loads(base))
    if trace.sha256 != sha256:
        raise SweepError(f"{source.path} has changed since the sweep began")
    return Replays(trace.requests)


def sweep(
    points: Sequence[GridPoint],
    tasks: Sequence[SweepTask],
    folder: SweepFolder,
    runner: Runner,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Figures]:
    """Replay every point and return figures in order.

    Points in the folder are not repeated; finished ones are kept at once. Those that do not fit their GPU have none.

    Raises SweepError.
    """
    done: dict[str, Figures] = {task.key: {} for task in tasks if task.unfit}
    for task in tasks:
        if (found := folder.load(task.key)) is not None:
            done[task.key] = found["figures"]
    progress(len(done))
    settings = {task.key: point.settings for task, point in zip(tasks, points, strict=True)}
    for task, result in runner([task for task in tasks if task.key not in done]):
        config = task.config.model_dump(mode="json")
        document = {"settings": settings[task.key], "figures": result, "config": config}
        folder.store(task.key, document)
        done[task.key] = result
        progress(len(done))
    return [done[task.key] for task in tasks]


# --- results ----------------------------------------------------------------------------------------------------


def prompt_lengths(requests: Requests) -> Counter[int]:
    """Count the prompts of each length in tokens."""
    return Counter(request.input_tokens for request in requests.records)


def rows_of(
    points: Sequence[GridPoint],
    tasks: Sequence[SweepTask],
    results: Sequence[Figures],
    quality: Quality,
    prompts: Mapping[int, int],
) -> list[SweepRow]:
    """Build the table of a sweep, with the quality of each point's policy; None where it was not measured."""
    rows = []
    for number, (point, task, result) in enumerate(zip(points, tasks, results, strict=True), start=1):
        policy = task.variant.policy
        kept = None if policy is None else sweep_quality.retention(quality, policy, prompts)
        values = {path: point.value(path) for path in point.settings}
        found: dict[str, float | None] = {**served_figures(result), "quality": kept}
        label = task.variant.label
        rows.append(SweepRow(number, task.key, point.settings, values, label, found, unfit=task.unfit))
    return rows


def known_figures(configs: Iterable[Config]) -> list[str]:
    """Return the names of all figures under any of the configurations: those of an empty replay, and quality."""
    nothing = (replay([], _with_explicit_sizes(config), [Variant()], StepCost(0.0, 0.0, 0.0))[0] for config in configs)
    return [*dict.fromkeys(name for result in nothing for name in figures(result)), "quality"]


def _with_explicit_sizes(config: Config) -> Config:
    """Return settings whose replicas need fit no GPU."""
    engine = config.engine.model_copy(update={"kv_bytes": ByteSize(KV_BYTES), "step_tokens": 1})
    cache = config.prefix_cache.model_copy(update={"memory_bytes": ByteSize(STORED_BYTES)})
    return config.model_copy(update={"engine": engine, "prefix_cache": cache})


def names_of(rows: Iterable[SweepRow]) -> list[str]:
    """Return the names of the figures that any row has."""
    return list(dict.fromkeys(name for row in rows for name in row.figures))


def check_axes(names: Sequence[str], known: Sequence[str]) -> None:
    """Check the axes of a Pareto front. Raises SweepError."""
    if len(set(names)) < 2:
        raise SweepError("--front: name at least two figures, with a comma between them")
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise SweepError(f"--front {name}: unknown figure; {hint}")
        if not sense(name):
            raise SweepError(f"--front {name}: neither more nor less of it is better")


def with_refusals(names: Sequence[str], rows: Sequence[SweepRow]) -> list[str]:
    """Return the axes of a front, and `refused` where rows differ in it: what is refused costs nothing."""
    differ = len({row.figures.get("refused") for row in rows}) > 1
    return [*names, *(["refused"] if differ and "refused" not in names else [])]


def with_front(rows: Sequence[SweepRow], names: Sequence[str]) -> list[SweepRow]:
    """Mark the rows on the Pareto front of these figures."""
    on = front([[row.figures.get(name) for name in names] for row in rows], [sense(name) for name in names])
    return [replace(row, front=one) for row, one in zip(rows, on, strict=True)]


def without_effect(rows: Sequence[SweepRow]) -> list[str]:
    """Return paths that vary between points which are otherwise alike, and never change a figure by that."""
    paths = dict.fromkeys(path for row in rows for path in row.settings)
    idle = []
    for path in paths:
        groups: dict[str, list[SweepRow]] = {}
        for row in rows:
            if path not in row.settings or row.unfit:
                continue
            rest = digest({other: value for other, value in row.settings.items() if other != path})
            groups.setdefault(rest, []).append(row)
        compared = [group for group in groups.values() if len(group) > 1]
        if compared and all(row.figures == group[0].figures for group in compared for row in group):
            idle.append(path)
    return idle

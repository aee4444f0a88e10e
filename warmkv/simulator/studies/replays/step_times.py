"""Where a replay takes its step times from: a measured profile, a roofline, the log's own timings, or the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from warmkv.config import Config
from warmkv.model_shape import ModelShape
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cluster.memory import gpus_per_replica, plan
from warmkv.simulator.steps import roofline, step_profile
from warmkv.simulator.steps.costs import (
    GroupTimes,
    MeasuredCosts,
    PhaseCosts,
    StepCost,
    StepKind,
    StepTimes,
    UniformCosts,
)
from warmkv.simulator.studies.replays import log_fit


def choose_cost(
    records: Sequence[RequestRecord],
    config: Config,
    spec_of: Callable[[RequestRecord], PolicySpec],
    source: Literal["auto", "config", "log"] = "auto",
) -> tuple[StepTimes, str]:
    """Choose the step times to replay with; return them and their origin in words.

    `auto` takes those of the profile that the settings name, else of the roofline of a whole simulator.model, else the
    log's where enough of its records carry timings, else simulator.step_*; `config` leaves the log out. Each group of
    replicas has its own, from what the log has of it; where that is not enough, from what the group could have served.
    Raises LogFitError if `log` is asked for and has none, and ProfileError if the profile cannot be read.
    """
    if not config.cluster.groups:
        return _of_kind(records, config, spec_of, source)
    columns, found = columns_of(records), dict[str, tuple[StepTimes, str]]()
    if source == "log" and not log_fit.measured(columns).any():
        raise log_fit.LogFitError(log_fit.NOTHING)
    for name, group in config.groups().items():
        own = columns.take(columns.is_named("group", name))
        if log_fit.measured(own).sum() < log_fit.ENOUGH:
            served = group.engine.capabilities(group.prefix_cache.storage).policies
            own = columns if served is None else columns.take(columns.are_named("policy", served))
        enough = log_fit.measured(own).sum() >= log_fit.ENOUGH
        found[name] = _of_kind(own, group, spec_of, source if enough or source != "log" else "auto")
    times = GroupTimes({name: times for name, (times, _) in found.items()})
    return times, "; ".join(f"{name or 'replica'}: {origin}" for name, (_, origin) in found.items())


def _of_kind(
    records: Sequence[RequestRecord],
    config: Config,
    spec_of: Callable[[RequestRecord], PolicySpec],
    source: Literal["auto", "config", "log"],
) -> tuple[StepTimes, str]:
    """Choose the step times of replicas of one kind."""
    simulator = config.simulator
    file = simulator.profile
    if file is not None and source != "log":
        return _of_profile(file, config)
    if simulator.model.is_whole and source != "log":
        return _of_roofline(simulator.model, config)
    count = int(log_fit.measured(columns_of(records)).sum())
    if source == "log" or (source == "auto" and count >= log_fit.ENOUGH):
        return log_fit.fit(records, config, spec_of), f"fitted to {count} measured requests of the log"
    cost = StepCost(simulator.step_a, simulator.step_b, simulator.step_c)
    return UniformCosts(PhaseCosts(cost, cost), simulator.overhead_seconds), "configuration (simulator.step_*)"


def _of_profile(file: Path, config: Config) -> tuple[StepTimes, str]:
    profile = step_profile.read(file)
    source = f"measured, {file} ({profile.summary})"
    if not profile.model.matches(kv_shape(config)):
        source += "; its model's KV shape is not that of simulator.model"
    return replace(profile.costs(), overhead=config.simulator.overhead_seconds), source


def _of_roofline(model: ModelShape, config: Config) -> tuple[StepTimes, str]:
    gpu, share = config.simulator.gpu, gpus_per_replica(config)
    if not config.engine.keeps_quantised:
        model = model.dequantised
    times = roofline.roofline(model, gpu, share)
    name = model.path.parent.name if model.path and model.path.suffix == ".json" else model.path and model.path.name
    source = f"roofline of {name or 'the model'} on {gpu.name}"
    return replace(times, overhead=config.simulator.overhead_seconds), source


def crowding(config: Config) -> str:
    """Return what explicit sizes take beyond the memory that replicas have, by group; an empty text if nothing."""
    said = []
    for name, group in config.groups().items():
        model, gpu = group.simulator.model, group.simulator.gpu
        if not model.is_whole:
            continue
        lines = {line.name: line.bytes for line in plan(group, model, gpu).lines}
        held, room = lines["weights"] + lines["slots"] + lines["prefixes"], gpu.memory * gpus_per_replica(group)
        if held > room:
            said.append(
                f"{f'group {name}: ' * bool(name)}weights, engine.kv_bytes and prefix_cache.memory_bytes take "
                f"{held / 1e9:.0f} GB, and a replica has {room / 1e9:.0f}"
            )
    return "; ".join(said)


def stand_ins(times: StepTimes, policies: Iterable[PolicySpec]) -> list[str]:
    """Return policies that a profile does not have, each with the one whose step times it gets instead."""
    if isinstance(times, GroupTimes):
        lacking = [stand_ins(each, policies) for each in times.groups.values()]
        return lacking[0] if all(lacking) else []
    if not isinstance(times, MeasuredCosts):
        return []
    kinds = dict.fromkeys(StepKind.of(spec) for spec in policies)
    return [f"{kind.label} gets the times of {near.label}" for kind in kinds if (near := times.nearest(kind)) != kind]

"""Plan the deployment of a model for a trace: GPUs, replicas and settings (`sizing`), and a peer's plan beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from warmkv.config import Config, place_in
from warmkv.model_shape import ModelShape, config_file, figures
from warmkv.simulator.studies.plans import peer_plan, sizing
from warmkv.simulator.studies.plans.peer_plan import PeerPlan
from warmkv.simulator.studies.plans.sizing import Machine, Sized, SizingError, SizingTrial
from warmkv.simulator.studies.sweeps import grid, sweep, sweep_quality
from warmkv.simulator.studies.sweeps.grid import Configure, Settings
from warmkv.simulator.studies.sweeps.tune import TuneConstraint
from warmkv.simulator.workload.source import LoadedTrace

DTYPE_BYTES = {"auto": 2, "float32": 4, "bfloat16": 2, "float16": 2}
BESIDE = list[tuple[PeerPlan, SizingTrial | None]]
"""The peer's plan for each GPU, and the trial with as many replicas."""


@dataclass(frozen=True)
class Deployment:
    """Hold a model and the settings it is planned with; `configure` reads them and more flags."""

    folder: Path  # of its config.json
    shape: ModelShape
    configure: Configure

    @classmethod
    def of(cls, model: str, read: Callable[..., Config]) -> Deployment:
        """Return the deployment of a model by its folder, config.json or hub name; `read` makes settings of flags.

        Raises ModelShapeError and what `read` raises.
        """
        path, fixed = config_file(model), read()
        sized_as = {**figures(path), "path": str(path.resolve()), "dtype_bytes": DTYPE_BYTES[fixed.model.dtype]}
        shape = ModelShape.model_validate(sized_as)
        flags = [
            f"simulator.model={yaml.safe_dump(shape.model_dump(mode='json'), default_flow_style=True)}",
            f"cluster.gpus_per_replica={fixed.cluster.gpus_per_replica or 1.0}",
            "cluster.autoscaling=null",
        ]
        for name, group in fixed.groups().items():
            if name:  # else it would have as many replicas as are tried, or scale by itself
                flags.append(place_in(name, f"cluster.replicas={group.cluster.replicas}"))
                flags.append(place_in(name, "cluster.autoscaling=null"))
        if fixed.model.path == "tiny" and model != "tiny":
            named = str(path.parent) if Path(model).exists() else model
            flags.append(f"model.path={yaml.safe_dump(named).splitlines()[0]}")
        return cls(path.parent if path.name == "config.json" else Path(model), shape, lambda more: read(*flags, *more))

    def machines(self, gpus: Sequence[str], profiles: Mapping[str, str]) -> list[Machine]:
        """Return kinds of GPU, each a name or YAML of figures, with measured step times where it has a profile.

        Without any it is that of the settings. Raises SizingError if two have one name, or if the settings name a
        profile as well or for several kinds, and GridError.
        """
        simulator = self.configure(()).simulator
        if simulator.profile is not None and (profiles or len(gpus) > 1):
            raise SizingError(
                "simulator.profile is of one GPU, and set already: give --profile GPU=FILE for each alone"
            )
        if not gpus:
            return [sizing.machine(None, profiles.get(simulator.gpu.name), self.configure, self.shape)]
        found = [
            sizing.machine(yaml.safe_load(gpu), profiles.get(gpu), self.configure, self.shape)
            for gpu in dict.fromkeys(gpus)
        ]
        if twice := [name for name, count in Counter(one.gpu.name for one in found).items() if count > 1]:
            raise SizingError(
                f"--gpu {twice[0]}: given twice; one with figures of its own needs a name of its own, and all of them"
            )
        return found


def plan(
    deployment: Deployment,
    limits: tuple[TuneConstraint, ...],
    machines: Sequence[Machine],
    trace: LoadedTrace,
    *,
    results: Path | None,
    host_bytes: int,
    max_replicas: int,
    ask_peer: bool,
    progress: Callable[[int], None],
) -> tuple[Sized, BESIDE]:
    """Search for what keeps a trace within the limits; `ask_peer` for its plan, too.

    `results` are those of `warmkv eval`, by which policies are chosen; a tier in host memory may have `host_bytes`.
    Raises QualityError if the results cannot be read.
    """
    configure, shape = deployment.configure, deployment.shape
    measured = {} if results is None else sweep_quality.read(results)
    least = next((limit.bound for limit in limits if limit.name == "quality"), sizing.LEAST_QUALITY)
    good, lower = sizing.policies_of(measured, sweep.prompt_lengths(trace.requests), least)
    step_times: dict[str, None] = {}
    tell = lambda said: step_times.update(dict.fromkeys(said))  # noqa: E731
    evaluate = sizing.evaluator(trace, configure(()), configure, measured, tell)
    search = sizing.Search(evaluate, limits, max_replicas, progress)

    def choices_of(machine: Machine) -> list[Settings]:
        config = grid.point(machine.settings, configure).config
        return sizing.choices(config, shape, machine.gpu, host_bytes, good)

    shown = [] if sizing.is_policy_set(configure(())) else lower or [sizing.UNMEASURED]
    sized = search.run(machines, choices_of, shown)
    beside = peer_plan.beside(search, sized, trace.requests, deployment.folder) if ask_peer else []
    groups = {name: group.cluster.replicas for name, group in configure(()).groups().items() if name}
    return replace(sized, step_times=tuple(step_times), groups=groups), beside

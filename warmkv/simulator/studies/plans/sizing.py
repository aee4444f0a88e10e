"""Sizing a deployment: of several kinds of GPU the fewest replicas, and the settings, that keep a trace within an SLO.

For each GPU the replicas are doubled until the limits are met, then halved in between; each other choice (slots, share
of stored prefixes, host tier, policy) is taken where it saves a replica. Every step is one replay, so the search is
bounded, and the same for the same trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from warmkv.config import Config
from warmkv.faults import UserError
from warmkv.gpus import Gpu
from warmkv.model_shape import ModelShape
from warmkv.policies.memory_plan import MemoryPlanError
from warmkv.policy_spec import PolicySpec
from warmkv.simulator.cluster.memory import gpus_per_replica, plan
from warmkv.simulator.studies.pareto import front
from warmkv.simulator.studies.sweeps import sweep, sweep_quality
from warmkv.simulator.studies.sweeps.grid import Configure, GridPoint, Settings, digest, point
from warmkv.simulator.studies.sweeps.replays import Replays
from warmkv.simulator.studies.sweeps.sweep import SweepRow, prompt_lengths
from warmkv.simulator.studies.sweeps.sweep_quality import Quality
from warmkv.simulator.studies.sweeps.tune import TuneConstraint, constraints_of
from warmkv.simulator.workload.source import LoadedTrace

HOURS = 730  # of a month
MOST_REPLICAS = 64
SLOTS = (32, 64, 128, 256)
"""Values of engine.max_slots beside the one that is set."""
STORED = (0.1, 0.6)
"""Shares of what is free for stored prefixes, beside a third (`memory_plan.STORED_SHARE`)."""
LEAST_QUALITY = 0.99
"""Quality that a measured policy must keep to be chosen, where the SLO names no limit of it."""
MOST_POLICIES = 3
UNMEASURED = "snapkv@0.2"
"""A policy to show what compression would save, where its quality was not measured."""
GROWING = ("dollars_month", "gpu_", "replicas_")
"""Figures, by how they begin, that more replicas raise: limits on them are checked on what the others need."""
LOAD = ("e2e_p50", "refused")
"""Figures that more replicas move under overload, where a share of requests may be 0 with twice as many."""
REPLICAS, GPU, POLICY = "cluster.replicas", "simulator.gpu", "compression.policy"
MOST_CHEAPER = 3

Figures = dict[str, float | None]


class SizingError(UserError):
    """A deployment that cannot be sized as asked; the message says what to give instead."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of GPU, the settings that say so, and why nothing was tried on it, if so."""

    gpu: Gpu
    settings: Settings
    refused: str = ""


@dataclass(frozen=True, slots=True)
class SizingTrial:
    """Hold a deployment with its figures, or why it does not fit its GPU."""

    gpu: str
    replicas: int
    choice: Settings  # beside the GPU and the replicas
    settings: Settings  # all of them
    figures: Figures
    met: bool
    excess: float  # over all limits that are missed, as shares of them together
    lowered: bool = False  # by a policy of lower or unknown quality: shown, and never chosen
    refused: str = ""  # why it was not replayed, so that its figures are unknown

    @property
    def dollars(self) -> float:
        """Return the dollars of a month."""
        return self.figures.get("dollars_month") or 0.0

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "settings"}


@dataclass(frozen=True, slots=True)
class Sized:
    """What was found."""

    limits: tuple[TuneConstraint, ...]
    machines: tuple[Machine, ...]
    trials: tuple[SizingTrial, ...]  # in the order they were replayed
    best: Mapping[str, SizingTrial | None]  # by GPU: the cheapest within the limits
    saved: Mapping[str, tuple[tuple[Settings, int], ...]]  # by GPU: choices, and the replicas that each saved
    lower: tuple[SizingTrial, ...] = ()  # with policies of lower or unknown quality, within all other limits
    step_times: tuple[str, ...] = ()  # where they come from, and what is to be said of them
    groups: Mapping[str, int] = field(default_factory=dict)  # replicas of each group, beside those that are searched

    @property
    def chosen(self) -> SizingTrial | None:
        """Return the cheapest deployment within the limits; None if there is none."""
        found = [trial for trial in self.best.values() if trial is not None]
        return min(found, key=lambda trial: trial.dollars, default=None)

    def nearest(self, gpu: str | None = None) -> SizingTrial | None:
        """Return the cheapest trial, on a GPU if it is named, of those that exceed limits least; None without one."""
        of = [trial for trial in self.trials if gpu in (None, trial.gpu)]
        return min(of, key=lambda trial: (trial.excess, trial.dollars), default=None)

    def refusal(self, one: Machine) -> str:
        """Return why nothing was replayed on a kind of GPU; an empty text where something was."""
        nearest = self.nearest(one.gpu.name)
        return one.refused or (nearest.refused if nearest else "")

    def cheaper(self) -> list[SizingTrial]:
        """Return what costs less than the choice: what misses limits, none of it both dearer and worse than another.

        After those, what keeps all limits but that of quality by another policy.
        """
        chosen = self.chosen
        less = [one for one in self.trials if chosen is not None and one.dollars < chosen.dollars and not one.refused]
        late = [one for one in less if not one.met and not one.lowered]
        on = front([[one.dollars, one.excess] for one in late], (-1, -1)) if late else []
        first = sorted((one for one, best in zip(late, on, strict=True) if best), key=lambda one: one.excess)
        return [*first[:MOST_CHEAPER], *(one for one in self.lower if one in less)]


Evaluate = Callable[[Settings], Figures]


def evaluator(
    trace: LoadedTrace,
    base: Config,
    configure: Configure,
    quality: Quality,
    tell: Callable[[Sequence[str]], None] = lambda step_times: None,
) -> Evaluate:
    """Return what replays the trace under settings: the figures of a sweep, dollars of a month, quality if known.

    It raises MemoryPlanError where a replica does not fit its GPU. `tell` gets what is to be said of step times.
    """
    prompts, replays = prompt_lengths(trace.requests), Replays(trace.requests)

    def evaluate(settings: Settings) -> Figures:
        at = point(settings, configure)
        for group in at.config.groups().values():
            if (model := group.simulator.model).is_whole:
                plan(group, model, group.simulator.gpu).check()
        (task,) = sweep.tasks_of([at], trace, base, "auto", False)
        tell(task.step_times)
        found = replays.figures(task)
        policy = at.config.compression.policy
        kept = 1.0 if policy == PolicySpec() else sweep_quality.retention(quality, policy, prompts)
        return {**found, "dollars_month": dollars_month(at.config), "quality": kept}

    return evaluate


def dollars_month(config: Config) -> float:
    """Return what the GPUs of a configuration cost in a month."""
    return sum(
        [
            group.cluster.replicas * gpus_per_replica(group) * group.simulator.gpu.dollars * HOURS
            for group in config.groups().values()
        ]
    )


def limits_of(slo: str, config: Config, measured: bool) -> tuple[TuneConstraint, ...]:
    """Read the limits of an SLO. Without one on them, no request may be refused. Raises TuneError and SizingError."""
    known = [*sweep.known_figures([config]), "dollars_month"]
    limits = constraints_of(slo, known, "--slo")
    if not limits:
        raise SizingError("--slo has no limit; write one as in ttft_p99<1,tpot_p99<0.05")
    names = [limit.name for limit in limits]
    if "quality" in names and not measured:
        raise SizingError("--slo limits quality, which is unknown without results of `warmkv eval`: give --eval FOLDER")
    if not {"refused", "in_slo", "goodput"} & set(names):
        limits.append(TuneConstraint("refused", "<=", 0.0))
    if measured and "quality" not in names:
        limits.append(TuneConstraint("quality", ">=", LEAST_QUALITY))
    return tuple(limits)


def machine(gpu: Any, profile: str | None, configure: Configure, model: ModelShape) -> Machine:
    """Return a kind of GPU and whether the model fits it; `gpu` is a name or figures, None for that of the settings.

    Raises GridError.
    """
    given = {GPU: gpu, "simulator.profile": profile}
    settings: Settings = {path: value for path, value in given.items() if value is not None}
    config = point(settings, configure).config
    found = config.simulator.gpu
    planned = plan(config, model, found)
    refused = ""
    if planned.needed > planned.most:
        refused = (
            f"the model does not fit: a replica needs {planned.needed / 1e9:,.0f} GB, and may have "
            f"{planned.most / 1e9:,.0f} (engine.memory_fraction of {found.memory / 1e9:,.0f})"
        )
    return Machine(found, settings, refused)


def choices(config: Config, model: ModelShape, gpu: Gpu, host_bytes: int, policies: Sequence[str]) -> list[Settings]:
    """Return what may be tried beside the number of replicas, one after the other; what was set is left as it is."""
    engine, cache = config.engine, config.prefix_cache
    found: list[Settings] = []
    if "max_slots" not in engine.model_fields_set:
        found += [{"engine.max_slots": slots} for slots in SLOTS if slots > engine.max_slots]
    if cache.enabled and cache.memory_bytes == "auto":
        planned = plan(config, model, gpu)
        free = planned.kv.bytes + planned.stored.bytes
        found += [{"prefix_cache.memory_bytes": f"{int(free * share) >> 20}MiB"} for share in STORED]
    if cache.enabled and host_bytes and not cache.host.memory_bytes:
        found.append({"prefix_cache.host.memory_bytes": f"{host_bytes >> 20}MiB"})
    if not (is_policy_set(config) or all(group.batches_as_vllm for group in config.groups().values())):
        found += [{POLICY: label} for label in policies]
    return found


def is_policy_set(config: Config) -> bool:
    """Return True if the settings name the policy that everything is replayed with."""
    return "policy" in config.compression.model_fields_set


def policies_of(quality: Quality, prompts: Mapping[int, int], least: float) -> tuple[list[str], list[str]]:
    """Return measured policies: those that keep `least` of the quality at their smallest such budget, and those below.

    Those that keep the least of a prompt come first; of either at most `MOST_POLICIES`.
    """
    within: dict[str, tuple[float, str]] = {}
    below: dict[str, tuple[float, str]] = {}
    for name, curve in sorted(quality.items()):
        plain = PolicySpec.model_validate(name)
        if plain == PolicySpec():
            continue
        if not plain.method.has_budget:
            (within if curve.retention[0] >= least else below)[name] = (1.0, name)
            continue
        for budget in _budgets(curve.budgets):
            spec = PolicySpec.model_validate({**plain.model_dump(), "budget": budget})
            kept = sweep_quality.retention(quality, spec, prompts)
            if kept is not None:
                group = within if kept >= least else below
                group.setdefault(name, (budget, spec.label))
                if group is within:
                    break
    first = [[label for _, label in sorted(group.values())[:MOST_POLICIES]] for group in (within, below)]
    return first[0], first[1]


def _budgets(measured: Sequence[float]) -> Iterator[float]:
    """Yield the shares that were measured, ascending; the largest a little less, since budgets are rounded up."""
    for before, share in zip([0.0, *measured], measured, strict=False):
        if share < 1:
            less = math.floor(1000 * (share - 0.02 * (share - before))) / 1000
            yield less if share == measured[-1] else math.ceil(1000 * share) / 1000


@dataclass
class Search:
    """The replays so far, and what they are searched with."""

    evaluate: Evaluate
    limits: tuple[TuneConstraint, ...]
    most: int = MOST_REPLICAS
    progress: Callable[[int], None] = lambda done: None
    trials: dict[str, SizingTrial] = field(default_factory=dict)
    saved: dict[str, list[tuple[Settings, int]]] = field(default_factory=dict)
    lowered: bool = False  # what is tried now is of lower or unknown quality

    def run(
        self,
        machines: Sequence[Machine],
        choices_of: Callable[[Machine], Sequence[Settings]],
        lower: Sequence[str] = (),
    ) -> Sized:
        """Search every machine that has room for the model, then what policies of lower quality would save."""
        best: dict[str, SizingTrial | None] = {}
        for one in machines:
            best[one.gpu.name] = None if one.refused else self._on(one, choices_of(one))
        found = [(one, trial) for one in machines if (trial := best[one.gpu.name]) is not None]
        lowered: tuple[SizingTrial, ...] = ()
        if found:
            lowered = self._lower(*min(found, key=lambda pair: pair[1].dollars), lower)
        saved = {gpu: tuple(steps) for gpu, steps in self.saved.items()}
        return Sized(self.limits, tuple(machines), tuple(self.trials.values()), best, saved, lowered)

    def _lower(self, one: Machine, chosen: SizingTrial, policies: Sequence[str]) -> tuple[SizingTrial, ...]:
        """Replay what policies of lower or unknown quality would save, within all limits but that of quality."""
        search = replace(self, limits=tuple(limit for limit in self.limits if limit.name != "quality"), lowered=True)
        found = []
        for label in policies if chosen.replicas > 1 else ():
            choice = {**chosen.choice, POLICY: label}
            found.append(search._fewest(one, choice, chosen.replicas - 1, chosen.replicas - 1))
        return tuple(trial for trial in found if trial is not None and trial.met)

    def attempt(self, one: Machine, replicas: int, choice: Settings) -> SizingTrial:
        """Replay a deployment, once; of one that does not fit its GPU keep the reason."""
        settings = {**one.settings, REPLICAS: replicas, **choice}
        key = digest(settings)
        if key not in self.trials:
            figures, refused = Figures(), ""
            try:
                figures = self.evaluate(settings)
            except MemoryPlanError as error:
                refused = error.reason
            excess = sum(max(0.0, limit.excess(figures)) for limit in self.limits)
            met = all(limit.met(figures) for limit in self.limits)
            self.trials[key] = SizingTrial(
                one.gpu.name, replicas, choice, settings, figures, met, excess, self.lowered, refused
            )
            self.progress(len(self.trials))
        return self.trials[key]

    def _on(self, one: Machine, alternatives: Sequence[Settings]) -> SizingTrial | None:
        choice: Settings = {}
        best = self._fewest(one, choice, 1, self.most)
        for settings in alternatives:
            tried = {**choice, **settings}
            if best is None:
                near = self._nearest(one)
                trial = self.attempt(one, near.replicas, tried)
                if not self._missed(trial):
                    best = self._fewest(one, tried, near.replicas, near.replicas)
                if self._missed_by(trial) < self._missed_by(near):
                    choice = tried
            elif best.replicas > 1:
                better = self._fewest(one, tried, best.replicas - 1, best.replicas - 1)
                if better is not None:
                    step = (settings, best.replicas - better.replicas)
                    self.saved.setdefault(one.gpu.name, []).append(step)
                    best, choice = better, tried
        if best is None and choice:
            best = self._fewest(one, choice, self._nearest(one).replicas, self.most)
        return best if best is not None and best.met else None

    def _nearest(self, one: Machine) -> SizingTrial:
        own = [trial for trial in self.trials.values() if trial.gpu == one.gpu.name]
        return min(own, key=self._missed_by)

    def _missed(self, trial: SizingTrial) -> list[TuneConstraint]:
        """Return the missed limits that more replicas can help to keep."""
        return [
            limit
            for limit in self.limits
            if not (limit.name.startswith(GROWING) and limit.sign in ("<", "<=")) and not limit.met(trial.figures)
        ]

    def _missed_by(self, trial: SizingTrial) -> float:
        return sum(limit.excess(trial.figures) for limit in self._missed(trial))

    def _moves(self, before: SizingTrial, after: SizingTrial) -> bool:
        """Return True if twice the replicas change a figure whose limit is missed, or the load."""
        names = {*(limit.name for limit in self._missed(before)), *LOAD}
        return any(before.figures.get(name) != after.figures.get(name) for name in names)

    def _fewest(
        self,
        one: Machine,
        choice: Settings,
        first: int,
        most: int,
    ) -> SizingTrial | None:
        """Return the trial with the fewest replicas, up to `most`, within the limits that replicas help to keep.

        Begins with `first`, doubles while that changes anything, then halves what lies between the last outside and the
        first within. Returns None if none is.
        """
        bad, count, before = 0, first, None
        while self._missed(found := self.attempt(one, count, choice)):
            if count >= most or found.refused or (before is not None and not self._moves(before, found)):
                return None
            bad, count, before = count, min(2 * count, most), found
        while found.replicas - bad > 1:
            middle = (bad + found.replicas) // 2
            trial = self.attempt(one, middle, choice)
            if self._missed(trial):
                bad = middle
            else:
                found = trial
        return found


def rows_of(sized: Sized, configure: Configure) -> list[SweepRow]:
    """Return the trials as rows of a sweep, which its charts draw; the front is that of dollars and what is limited."""
    rows = []
    for number, trial in enumerate((one for one in sized.trials if not one.refused), start=1):
        at: GridPoint = point(trial.settings, configure)
        settings = {"gpu": trial.gpu, REPLICAS: trial.replicas, **trial.choice}
        values: dict[str, float | str] = {path: at.value(path) for path in (REPLICAS, *trial.choice)}
        label = at.config.compression.policy.label
        rows.append(
            SweepRow(number, digest(trial.settings), settings, {"gpu": trial.gpu, **values}, label, trial.figures)
        )
    limited = [limit.name for limit in sized.limits if limit.name not in ("refused", "quality")]
    return sweep.with_front(rows, list(dict.fromkeys(["dollars_month", *limited])))

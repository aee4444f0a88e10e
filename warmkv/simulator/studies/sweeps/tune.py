"""Searching a space of settings for the least of a figure within limits on others.

A space that is small enough is tried in full. A larger one is searched by a tree-structured Parzen estimator (Bergstra
et al., NeurIPS 2011), as optuna has it, with constraints. Trials are asked for in rounds of a fixed size, so that the
search is the same for any number of workers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from warmkv.faults import UserError
from warmkv.simulator.studies.sweeps.figures import Values
from warmkv.simulator.studies.sweeps.grid import Settings, digest

ROUND = 8  # trials that are asked for before any of them is known
PATIENCE = 20  # rounds in a row that bring nothing new, after which the search has settled
UNKNOWN = 1e9  # how far an unknown figure is from its limit
_CONSTRAINT = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*", re.IGNORECASE)


class TuneError(UserError):
    """A search that cannot be done as asked; the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class TuneConstraint:
    """A limit on a figure."""

    name: str
    sign: str
    bound: float

    @property
    def text(self) -> str:
        return f"{self.name}{self.sign}{self.bound:g}"

    def met(self, figures: Values) -> bool:
        """Check figures against the limit; an unknown figure does not meet it."""
        value = figures.get(self.name)
        if value is None:
            return False
        return {"<": value < self.bound, "<=": value <= self.bound, ">": value > self.bound, ">=": value >= self.bound}[
            self.sign
        ]

    def excess(self, figures: Values) -> float:
        """Return a figure's excess over the limit, as a share of it; not above 0 where it is within."""
        value = figures.get(self.name)
        if value is None:
            return UNKNOWN
        beyond = value - self.bound if self.sign in ("<", "<=") else self.bound - value
        return beyond / (abs(self.bound) or 1.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings that were tried."""

    settings: Settings
    figures: dict[str, float | None]
    met: bool  # every constraint
    excess: float  # of the constraint that is exceeded most

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Evaluate = Callable[[Sequence[Settings]], Sequence[dict[str, float | None]]]


def constraints_of(text: str, known: Sequence[str], option: str = "--subject-to") -> list[TuneConstraint]:
    """Read `ttft_p99<2,quality>0.95`, as an option has it. Raises TuneError."""
    found = []
    for piece in filter(str.strip, text.split(",")):
        match = _CONSTRAINT.fullmatch(piece)
        try:
            name, sign, number = match.groups() if match else ("", "", "")
            bound = float(number)
        except ValueError:
            raise TuneError(
                f"{option} {piece.strip()!r}: write FIGURE<NUMBER, with <, <=, > or >=, as in ttft_p99<2"
            ) from None
        check_figure(option, name, known)
        found.append(TuneConstraint(name, sign, bound))
    return found


def check_figure(option: str, name: str, known: Sequence[str]) -> None:
    """Check a figure's name. Raises TuneError with the nearest known one."""
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise TuneError(f"{option} {name}: unknown figure; {hint}")


def size_of(axes: Mapping[str, Sequence[Any]]) -> int:
    return math.prod(map(len, axes.values()))


def search(
    axes: Mapping[str, Sequence[Any]],
    evaluate: Evaluate,
    minimize: str,
    constraints: Sequence[TuneConstraint],
    *,
    trials: int,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Trial]:
    """Try at most `trials` different choices, in the order they were tried; the same seed tries the same ones."""
    tried: dict[str, Trial] = {}

    def attempt(choices: Sequence[Settings]) -> None:
        fresh = {digest(settings): settings for settings in choices if digest(settings) not in tried}
        chosen = list(fresh.items())[: trials - len(tried)]
        results = evaluate([settings for _, settings in chosen])
        for (key, settings), figures in zip(chosen, results, strict=True):
            excess = max((limit.excess(figures) for limit in constraints), default=0.0)
            tried[key] = Trial(settings, figures, all(limit.met(figures) for limit in constraints), excess)
        progress(len(tried))

    if size_of(axes) <= trials:
        attempt([dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())])
    else:
        _estimate(axes, attempt, tried, minimize, constraints, trials, seed)
    return list(tried.values())


def best_of(trials: Sequence[Trial], minimize: str) -> Trial | None:
    """Return the best trial of those that meet every constraint; None if none does."""
    within = [(value, trial) for trial in trials if trial.met and (value := trial.figures.get(minimize)) is not None]
    return min(within, key=lambda one: one[0])[1] if within else None


def refusing_no_more(limits: Sequence[TuneConstraint], minimize: str, before: Values) -> list[TuneConstraint]:
    """Return limits under which no more requests are refused than before, unless refusals are asked about.

    A request that is refused costs nothing and takes no time: settings that refuse most would win.
    """
    refused = before.get("refused")
    if refused is None or "refused" in (minimize, *(limit.name for limit in limits)):
        return list(limits)
    return [*limits, TuneConstraint("refused", "<=", refused)]


def improves(trial: Trial, before: Values, minimize: str, constraints: Sequence[TuneConstraint]) -> bool:
    """Return True if a trial within the limits has less of the figure than the present settings, if these are."""
    now = before.get(minimize)
    if now is None or not all(limit.met(before) for limit in constraints):
        return trial.met
    value = trial.figures.get(minimize)
    return trial.met and value is not None and value < now


def nearest_of(trials: Sequence[Trial]) -> Trial:
    """Return the trial that exceeds its limits least; of at least one."""
    return min(trials, key=lambda trial: trial.excess)


def _estimate(
    axes: Mapping[str, Sequence[Any]],
    attempt: Callable[[Sequence[Settings]], None],
    tried: Mapping[str, Trial],
    minimize: str,
    constraints: Sequence[TuneConstraint],
    trials: int,
    seed: int,
) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    space: dict[str, Any] = {path: _distribution(values) for path, values in axes.items()}
    idle = 0
    while len(tried) < trials and idle < PATIENCE:
        before = len(tried)
        asked = [study.ask(space) for _ in range(ROUND)]
        choices = [{path: axes[path][at] for path, at in trial.params.items()} for trial in asked]
        attempt(choices)
        for trial, settings in zip(asked, choices, strict=True):
            done = tried.get(digest(settings))
            value = None
            if done is not None:  # else one more than the trials that were asked for
                value = done.figures.get(minimize)
                for limit in constraints:
                    trial.set_constraint(limit.text, limit.excess(done.figures))
            study.tell(trial, value, state=None if value is not None else optuna.trial.TrialState.FAIL)
        idle = 0 if len(tried) > before else idle + 1


def _distribution(values: Sequence[Any]) -> Any:
    """Return places in a list: near each other means alike where the values are numbers in order."""
    import optuna

    ordered = all(isinstance(value, int | float) for value in values) and list(values) == sorted(values)
    if ordered:
        return optuna.distributions.IntDistribution(0, len(values) - 1)
    return optuna.distributions.CategoricalDistribution(range(len(values)))

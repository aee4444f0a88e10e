"""What a policy leaves of a model's answers at a budget, as `warmkv eval` measured it. Unknown stays unknown.

Retention is the score over that of the full cache on the same samples, every task weighed alike. A policy was measured
at several shares of the full cache's bytes, each of which gave it a budget, a share of the prompt's tokens; between two
of them retention is interpolated, beyond them it is unknown. Layers with a sliding window keep less of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from warmkv.faults import UserError
from warmkv.policies.budgets import resolve_budget
from warmkv.policy_spec import PolicySpec

FULL = "full"
_SAMPLE = ("task", "variant", "length", "depth", "sample")
COLUMNS = (*_SAMPLE, "policy", "share", "score", "budget", "prompt_tokens")


class QualityError(UserError):
    """A file that holds no results of `warmkv eval`."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Retention by the budget as a share of a prompt's tokens, ascending; of a policy without a budget at 1."""

    budgets: tuple[float, ...]
    retention: tuple[float, ...]

    def at(self, budget: float) -> float | None:
        """Interpolate; return None outside of what was measured."""
        if not self.budgets[0] <= budget <= self.budgets[-1]:
            return None
        return float(np.interp(budget, self.budgets, self.retention))


Quality = Mapping[str, Curve]
"""By the short form of a policy without its budget."""


def read(path: Path) -> dict[str, Curve]:
    """Read the curves of a `results.parquet`. Raises QualityError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except OSError as error:
        raise QualityError(f"cannot read {path}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise QualityError(f"{path} is no parquet file: {error}") from None
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise QualityError(f"{path} has no column {missing[0]}: is it the results.parquet of `warmkv eval`?")
    return curves(table.select(list(COLUMNS)).to_pylist())


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curve of every policy that was measured against the full cache."""
    rows = list(rows)
    full = {_sample(row): row["score"] for row in rows if row["policy"] == FULL}
    groups: dict[tuple[str, float | None], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if _sample(row) in full:
            groups[row["policy"], row["share"]].append(row)
    measured: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (policy, _), of in groups.items():
        base = _mean_over_tasks(of, [full[_sample(row)] for row in of])
        if base > 0:
            budget = fmean(_share(row["budget"], row["prompt_tokens"]) for row in of)
            retention = _mean_over_tasks(of, [row["score"] for row in of]) / base
            measured[policy][round(budget, 9)].append(retention)
    return {
        policy: Curve(tuple(sorted(points)), tuple(fmean(points[budget]) for budget in sorted(points)))
        for policy, points in measured.items()
    }


def retention(quality: Quality, spec: PolicySpec, prompts: Mapping[int, int]) -> float | None:
    """Return mean over prompts, given as a count for each length in tokens; None if any of it was not measured.

    A prompt within the budget is kept whole: it counts as the full cache in the policy's storage.
    """
    own, whole = quality.get(label_of(spec)), quality.get(label_of(PolicySpec(name="full", storage=spec.storage)))
    if not spec.method.has_budget:
        return own.retention[0] if own is not None else None
    total = 0.0
    for prompt, count in prompts.items():
        budget = _share(resolve_budget(spec, prompt), prompt)
        curve = whole if budget == 1 else own
        found = None if curve is None else curve.retention[0] if curve is whole else curve.at(budget)
        if found is None:
            return None
        total += found * count
    count = sum(prompts.values())
    return total / count if count else None


def label_of(spec: PolicySpec) -> str:
    """Return the short form without the budget, as results name policies."""
    return spec.label.replace(f"@{spec.budget}", "", 1)


def _share(budget: int | None, prompt: int) -> float:
    return 1.0 if budget is None else min(1.0, budget / prompt)


def _sample(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _SAMPLE)


def _mean_over_tasks(rows: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> float:
    by_task: dict[str, list[float]] = defaultdict(list)
    for row, score in zip(rows, scores, strict=True):
        by_task[row["task"]].append(score)
    return fmean(fmean(of) for of in by_task.values())

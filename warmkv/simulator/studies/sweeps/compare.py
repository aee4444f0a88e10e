"""What changed between two runs: their settings, and their figures with the largest effects first."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warmkv.faults import UserError
from warmkv.policy_spec import PolicySpec
from warmkv.simulator.studies.sweeps.figures import sense, served_figures
from warmkv.simulator.studies.sweeps.sweep_folder import changes

_POLICY_KEYS = {"name", "budget", "decode", "storage"}
_POINT = re.compile(r"(.+):([0-9]+)")


class CompareError(UserError):
    """A run that cannot be read; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Settings as a tree, figures by name; None is unknown."""

    name: str
    settings: dict[str, Any]
    figures: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Effect:
    """A figure in both runs. `change` is b / a - 1; None where a is 0 and b is not, or the signs differ."""

    name: str
    a: float
    b: float
    change: float | None
    better: bool | None  # None where it did not change, or neither way is better


@dataclass(frozen=True, slots=True)
class Comparison:
    settings: dict[str, tuple[Any, Any]]  # by path, what each run has; None where it has none
    effects: list[Effect]  # the largest first
    only_a: list[str]  # figures that the other run lacks, or does not know
    only_b: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(text: str) -> ComparedRun:
    """Read a run by folder; a point of a sweep by `FOLDER:NUMBER` or its file in `points/`. Raises CompareError."""
    path = Path(text)
    if (path / "summary.json").is_file():
        meta = _tree(path / "meta.json") if (path / "meta.json").exists() else {}
        config = meta.pop("config", {})
        settings = {**meta, **config} if isinstance(config, dict) else meta
        return ComparedRun(text, settings, _numbers(path / "summary.json", _tree(path / "summary.json")))
    if path.is_file():
        return _point(text, path)
    folder, number = (Path(match[1]), int(match[2])) if (match := _POINT.fullmatch(text)) else (path, 0)
    results = folder / "results.json"
    if not results.is_file():
        raise CompareError(f"{text} is no run: it has no summary.json, and is no point of a sweep (FOLDER:NUMBER)")
    points = _tree(results).get("points", [])
    if not 1 <= number <= len(points):
        raise CompareError(f"{text}: the sweep has points 1 to {len(points)}; write {folder}:1")
    chosen = points[number - 1]
    if why := chosen.get("unfit"):
        raise CompareError(f"{text} has no figures: {why}")
    run = _point(text, folder / "points" / f"{chosen['key']}.json")
    return ComparedRun(text, run.settings, _numbers(results, chosen["figures"]))


def compare(a: ComparedRun, b: ComparedRun) -> Comparison:
    """Compare two results: effects are ordered by |ln(b / a)|, so that doubling counts as much as halving; from or to 0
    counts most.
    """
    known_a = {name: value for name, value in a.figures.items() if value is not None}
    known_b = {name: value for name, value in b.figures.items() if value is not None}
    both = [_effect(name, known_a[name], known_b[name]) for name in known_a if name in known_b]
    return Comparison(
        settings=changes(_with_labels(a.settings), _with_labels(b.settings)),
        effects=sorted(both, key=lambda effect: -_size(effect.a, effect.b)),
        only_a=[name for name in known_a if name not in known_b],
        only_b=[name for name in known_b if name not in known_a],
    )


def _effect(name: str, a: float, b: float) -> Effect:
    change = 0.0 if a == b else b / a - 1 if a and (a < 0) == (b < 0) else None
    better = None if a == b or not sense(name) else (b - a) * sense(name) > 0
    return Effect(name, a, b, change, better)


def _size(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return abs(math.log(b / a)) if a and b and (a < 0) == (b < 0) else math.inf


def _point(name: str, file: Path) -> ComparedRun:
    tree = _tree(file)
    if not isinstance(tree.get("figures"), dict):
        raise CompareError(f"{file} is no point of a sweep")
    own = {key: value for key, value in tree.get("settings", {}).items() if "." not in key}  # ttl
    return ComparedRun(name, {**tree.get("config", {}), **own}, _numbers(file, tree["figures"]))


def _numbers(file: Path, tree: Mapping[str, Any]) -> dict[str, float | None]:
    for name, value in tree.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CompareError(f"{file}: {name} is no number: {value!r}")
    return served_figures(
        {name: None if value is None or not math.isfinite(value) else float(value) for name, value in tree.items()}
    )


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompareError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise CompareError(f"{file} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise CompareError(f"{file}: expected a mapping, got {type(tree).__name__}")
    return tree


def _with_labels(tree: Any) -> Any:
    """Replace policies by their short form, one word for sixteen knobs."""
    if not isinstance(tree, dict):
        return tree
    if tree.keys() >= _POLICY_KEYS:
        return PolicySpec.model_validate(tree).label
    return {key: _with_labels(value) for key, value in tree.items()}

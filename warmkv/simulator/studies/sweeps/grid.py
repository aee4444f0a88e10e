"""The points of a sweep: which settings take which values, read from a YAML file.

A mapping of configuration paths to values is their product; a list of mappings is a point each. Beside the paths of
the configuration there is `ttl`: how long every prefix lives, breakpoints with a TTL of their own included.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from warmkv.config import Config, ConfigError, strict_yaml
from warmkv.faults import UserError
from warmkv.policy_spec import PolicySpec
from warmkv.simulator.studies import quantities
from warmkv.simulator.studies.replays.variants import Variant, VariantError

TTL = "ttl"
MAX_POINTS = 10_000
Settings = dict[str, Any]
Configure = Callable[[Sequence[str]], Config]  # `section.key=value` flags to the configuration with them


class GridError(UserError):
    """A grid that cannot be swept; the message says where and what to write."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One choice of settings. `ttl` in seconds; None leaves lifetimes as recorded and configured."""

    settings: Settings  # configuration path or `ttl`: the value as written
    config: Config
    ttl: float | None

    @property
    def label(self) -> str:
        return label(self.settings)

    def value(self, path: str) -> float | str:
        """Return the value of a path: bytes, seconds and other numbers as such, anything else as text."""
        if path == TTL:
            return "as recorded" if self.ttl is None else self.ttl
        found: Any = self.config
        for part in path.split("."):
            found = getattr(found, part) if isinstance(found, BaseModel) else found[part]
        if path == "prefix_cache.default_ttl":
            return self.config.prefix_cache.ttls[found]
        if isinstance(found, PolicySpec):
            return found.label
        if isinstance(found, int | float) and not isinstance(found, bool):
            return float(found)
        return json.dumps(found.model_dump(mode="json")) if isinstance(found, BaseModel) else str(found)


def read(path: Path, most: int = MAX_POINTS) -> list[Settings]:
    """Read the settings of every point, in order and each once. Raises GridError."""
    document = _document(path)
    if isinstance(document, list):
        found: Iterator[Settings] = (dict(_flat(item, f"point {n}")) for n, item in enumerate(document, start=1))
        count = len(document)
    else:
        choices = axes(document)
        found = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
        count = math.prod(map(len, choices.values()))
    if count > most:
        raise GridError(f"{path} has {count:,} points, more than {most:,}; vary less, or raise --max-points")
    return list({digest(settings): settings for settings in found}.values())


def read_axes(path: Path) -> dict[str, list[Any]]:
    """Read the choices for each path of a file that is a mapping. Raises GridError."""
    document = _document(path)
    if isinstance(document, list):
        raise GridError(f"{path} is a list of points; to search, write a mapping of paths to choices")
    return axes(document)


def axes(document: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the choices for each path: a list, or a single value. Raises GridError where there is none."""
    choices = {path: value if isinstance(value, list) else [value] for path, value in _flat(document, "the grid")}
    if empty := [path for path, values in choices.items() if not values]:
        raise GridError(f"{empty[0]}: no value to choose from")
    return choices


def point(settings: Settings, configure: Configure) -> GridPoint:
    """Build a point with its configuration, checked.

    Raises GridError, for an unknown path with the nearest known one.
    """
    roots = [*Config.model_fields, TTL]
    for path in settings:
        root = path.split(".")[0]
        if root not in roots or (root == TTL and path != TTL):
            near = difflib.get_close_matches(root, roots, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(roots)}"
            raise GridError(f"{path}: unknown key; {hint}")
        if inside := [other for other in settings if other.startswith(f"{path}.")]:
            raise GridError(f"{path} and {inside[0]} in one point: one contains the other")
    flags = [f"{path}={yaml.safe_dump(value, default_flow_style=True)}" for path, value in settings.items()]
    try:
        ttl = _ttl(settings[TTL]) if TTL in settings else None
        return GridPoint(settings, configure([flag for flag in flags if not flag.startswith(f"{TTL}=")]), ttl)
    except (ConfigError, VariantError, quantities.QuantityError) as error:
        raise GridError(f"{label(settings)}: {error}") from None


def label(settings: Mapping[str, Any]) -> str:
    """Shorten a point, as in `memory_bytes 1GiB, policy snapkv@0.2`."""
    names = short_names(list(settings))
    return ", ".join(f"{names[path]} {shown(value)}" for path, value in settings.items()) or "as configured"


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Shorten each path to its last part, with as much before it as tells the paths apart."""

    def name(path: str) -> str:
        parts = path.split(".")
        for count in range(1, len(parts)):
            tail = ".".join(parts[-count:])
            if sum(f".{other}".endswith(f".{tail}") for other in paths) == 1:
                return tail
        return path

    return {path: name(path) for path in paths}


def shown(value: Any) -> str:
    """Format a value as a person would write it."""
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()


def digest(settings: Mapping[str, Any], *more: str) -> str:
    """Hash these settings and whatever else decides a point's result."""
    text = json.dumps([settings, *more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _document(path: Path) -> Any:
    try:
        document = strict_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GridError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise GridError(f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise GridError(f"{path} is not YAML: {error}") from None
    if not isinstance(document, dict | list) or not document:
        raise GridError(
            f"{path}: write a mapping, as in `prefix_cache.memory_bytes: [1GiB, 4GiB]`, or a list of points"
        )
    return document


def _flat(tree: Any, where: str, lead: str = "") -> list[tuple[str, Any]]:
    """Return nested mappings as dotted paths. Raises GridError."""
    if not isinstance(tree, Mapping):
        raise GridError(f"{where}: expected a mapping of paths to values, got {tree!r}")
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if not isinstance(key, str) or not key.strip() or "=" in key:
            raise GridError(f"{where}: {lead}{key} is no configuration path")
        path = f"{lead}{key.strip()}"
        pairs += _flat(value, where, f"{path}.") if isinstance(value, Mapping) and value else [(path, value)]
    if twice := [path for path, _ in pairs if sum(path == other for other, _ in pairs) > 1]:
        raise GridError(f"{where}: {twice[0]} is given twice")
    return pairs


def _ttl(value: Any) -> float | None:
    if value is None or value == "as recorded":
        return None
    seconds = quantities.seconds(str(value))
    Variant(seconds)  # refuses what is not positive
    return seconds

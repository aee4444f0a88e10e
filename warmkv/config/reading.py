"""Read the configuration from a YAML document, then the environment, then `--set` flags; the later source wins."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from warmkv.config.base import ENV_PREFIX, ConfigError
from warmkv.config.tree import Config


def load(
    path: Path | None = None,
    *,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read the configuration: file, then environment, then `a.b=value` flags.

    Raises ConfigError with the place of every fault and, for an unknown key, the nearest known one.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from None
        if document is not None and not isinstance(document, dict):
            raise ConfigError(f"{path}: expected a mapping of sections, got {type(document).__name__}")
        tree = document or {}
    for dotted, text in _environment(os.environ if environ is None else environ):
        put(tree, dotted, read_value(dotted, text))
    for flag in flags:
        dotted, equals, text = flag.partition("=")
        if not equals:
            raise ConfigError(f"--set {flag}: write it as section.key=value, as in engine.max_slots=8")
        put(tree, dotted, read_value(dotted, text))
    return parse(tree)


def parse(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of plain values. Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, Config))) from None


def describe(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a fault: the dotted place, what is wrong and, for an unknown key, the nearest known one."""
    lines = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _known_keys(model, fault["loc"][:-1])
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            lines.append(f"{place}: unknown key; {hint}")
        else:
            lines.append(f"{place or 'configuration'}: {fault['msg'].removeprefix('Value error, ')}")
    return lines


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            candidates = (model.model_fields[part].annotation, *get_args(model.model_fields[part].annotation))
            nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
            if nested:
                model = nested[0]
    return sorted(model.model_fields)


def _environment(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the settings among the environment's variables: those that name a section, `WARMKV_SECTION__KEY`."""
    found = []
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            found.append((name.removeprefix(ENV_PREFIX).lower().replace("__", "."), text))
    return found


def read_value(dotted: str, text: str) -> Any:
    """Parse a value as it is written behind `section.key=`. Raises ConfigError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{dotted}: {text!r} is not a YAML value: {error}") from None


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a value at its place in a tree of plain values. Raises ConfigError where something else is in the way."""
    *parents, leaf = dotted.strip().split(".")
    node = tree
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            place = ".".join(parents[:depth])
            raise ConfigError(f"{dotted}: {place} is already {node!r}; set it as a whole or write it as a mapping")
    node[leaf] = value

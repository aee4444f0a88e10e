"""Read the configuration, and tell its faults."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError

from warmkv.config.base import ConfigError
from warmkv.config.removed import without_removed
from warmkv.config.tree import Config
from warmkv.config.values import Place


def load(
    path: Path | None = None,
    *,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read the configuration: a YAML document, then the environment, then `a.b=value` flags; the later source wins.

    Raises ConfigError with the key and the source of every fault and, for an unknown key, the nearest known one.
    """
    from warmkv.config import sources as of  # pydantic-settings takes a while to import

    sources = [of.flags_source(flags)]
    sources.append(of.environment_source(os.environ if environ is None else environ, above=sources[:1]))
    if path is not None:
        sources.append(of.document_source(path, above=sources[:2]))

    def origin(place: Place) -> str | None:
        return next(filter(None, (source.origin(place) for source in sources)), None) if place else None

    return parse(of.merge(sources), origin)


def parse(tree: Mapping[str, object], origin: Callable[[Place], str | None] = lambda place: None) -> Config:
    """Validate a tree of plain values; `origin` names the source of the value at a place. Raises ConfigError."""
    try:
        return Config.model_validate(without_removed(tree, origin))
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, Config, origin))) from None


def describe(
    error: ValidationError, model: type[BaseModel], origin: Callable[[Place], str | None] = lambda place: None
) -> list[str]:
    """Return a line for each fault: the key, what is wrong, the nearest known key for an unknown one, the source."""
    lines = []
    for fault in error.errors():
        dotted = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _known_keys(model, fault["loc"][:-1])
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            line = f"{dotted}: unknown key; {hint}"
        else:
            said = fault["msg"].removeprefix("Value error, ")  # of the whole: it names its settings itself
            line = f"{dotted}: {said}" if dotted else said
        source = origin(fault["loc"])
        lines.append(f"{line} ({source})" if source else line)
    return lines


def _known_keys(model: type[BaseModel], path: Place) -> list[str]:
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            candidates = (model.model_fields[part].annotation, *get_args(model.model_fields[part].annotation))
            nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
            if nested:
                model = nested[0]
    return sorted(model.model_fields)

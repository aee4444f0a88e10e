"""The settings in force as the versions of the live configuration tell them, their sizes, and their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from warmkv.config import Config, ConfigError
from warmkv.platform.live_config import Version, in_force
from warmkv.platform.whatif.candidates import WhatIfCandidate, proposals
from warmkv.platform.whatif.replays import Default
from warmkv.platform.whatif.sizes import Held, with_sizes

P = ParamSpec("P")
T = TypeVar("T")


class Latest(Generic[P, T]):
    """Call a function anew only if its arguments are not those of the last call."""

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function
        self._last: tuple[object, T] | None = None

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        if self._last is None or self._last[0] != (arguments, named):
            self._last = (arguments, named), self._function(*arguments, **named)
        return self._last[1]


@dataclass(frozen=True, slots=True)
class InForce:
    """Hold the settings in force, and what requests got by default over time."""

    now: Config
    defaults: Sequence[Default]  # by time, the first since always
    changed: float  # Unix time of the last change; 0: none
    version: int


def settings_of(start: Config, versions: Sequence[Version]) -> InForce:
    """Read versions, the last one first."""
    defaults, now, changed, number = [Default.of(0.0, start)], start, 0.0, 0
    for version in reversed(versions):
        try:
            now = in_force(start, version)
        except ConfigError:
            continue  # the gateways serve as before, too
        changed = version.when.timestamp() if version.when else 0.0
        defaults.append(Default.of(changed, now))
        number = version.number
    return InForce(now, defaults, changed, number)


def sized(now: Config, held: Held) -> tuple[Config, Sequence[WhatIfCandidate]]:
    """Return a configuration with its sizes, and its neighbours."""
    config = with_sizes(now, held)
    return config, proposals(config)

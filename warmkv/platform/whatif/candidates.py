"""Settings to try: those that an operator names, and neighbours of the ones in force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from warmkv.config import Config, ConfigError, Eviction
from warmkv.platform.live_config import LIVE, changed, setting_of

NOW, BEST = "now", "best"
"""Names of the settings in force, and of what the search found."""

MOST_CANDIDATES = 8  # of operators
MOST_REPLICAS = 1024  # of a candidate, and gateways: a replay takes longer and more memory with each
BUDGETS = (0.5, 0.2)  # of the policy that is proposed where all requests keep everything
COMPRESSING = "snapkv"

_RESTART = {
    "prefix_cache": (
        "enabled", "automatic", "memory_bytes", "eviction", "storage", "host", "disk", "tenant_share", "keep_warm"
    ),
    "engine": ("step_tokens", "max_slots", "max_queue", "kv_bytes", "max_context"),
    "cluster": ("replicas", "autoscaling", "gateways", "max_queued_requests"),
    "transfer": ("byte_seconds",),
}  # fmt: skip
RESTART = tuple(f"{section}.{field}" for section, fields in _RESTART.items() for field in fields)
"""Settings that need a restart of the service, and that a replay models."""


class TooManyCandidatesError(RuntimeError):
    """A candidate for which there is no room."""


class UnknownCandidateError(LookupError):
    """A candidate that is not there, or cannot be taken away."""


@dataclass(frozen=True, slots=True)
class WhatIfCandidate:
    """Changes of the settings in force. `proposed` ones come and go with those."""

    name: str
    changes: Mapping[str, Any]
    proposed: bool = False

    @property
    def restart(self) -> tuple[str, ...]:
        """Return those settings of it that need a restart of the service."""
        return tuple(dotted for dotted in self.changes if setting_of(dotted) not in LIVE)


def check(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with changes. Raises ConfigError where they do not fit, or no replay would follow them."""
    for dotted in changes:
        if (setting := setting_of(dotted)) in LIVE + RESTART:
            continue
        if near := get_close_matches(setting, LIVE + RESTART, n=1, cutoff=0.8):
            raise ConfigError(
                f"{dotted}: unknown setting, or no choice that a replay can judge; did you mean {near[0]!r}?"
            )
        raise ConfigError(f"{dotted}: no choice that a replay can judge; there are {', '.join(LIVE + RESTART)}")
    tried = changed(config, changes)
    for what, count, present in (
        ("cluster.replicas", _most_replicas(tried), _most_replicas(config)),
        ("cluster.gateways", tried.cluster.gateways, config.cluster.gateways),
    ):
        if count > max(MOST_REPLICAS, present):
            raise ConfigError(f"{what}: a candidate has at most {MOST_REPLICAS} of them, not {count}")
    return tried


def _most_replicas(config: Config) -> int:
    """Return the most replicas that all groups together may have."""
    return sum(group.cluster.most_replicas for group in config.groups().values())


def proposals(config: Config) -> list[WhatIfCandidate]:
    """Return the neighbours of a configuration, whose sizes are resolved; those that do not fit are left out."""
    found = []
    for name, changes in _neighbours(config):
        try:
            if check(config, changes) != config:
                found.append(WhatIfCandidate(name, changes, proposed=True))
        except ConfigError:
            continue  # as an order of eviction that goes with no tier of this service
    return found


def _neighbours(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    cache, spec, routing = config.prefix_cache, config.compression.policy, config.routing
    if cache.enabled:
        own = cache.ttls[cache.default_ttl]
        for word, factor in (("double", 2), ("half", 0.5)):
            yield f"ttl-{word}", {"prefix_cache.ttls": {**cache.ttls, cache.default_ttl: own * factor}}
            yield f"memory-{word}", {"prefix_cache.memory_bytes": int(cache.memory_limit * factor)}
        classes = sorted(cache.ttls, key=lambda name: cache.ttls[name])
        at = classes.index(cache.default_ttl)
        for name in classes[max(0, at - 1) : at + 2]:
            yield f"ttl-{name}", {"prefix_cache.default_ttl": name}
        for order in get_args(Eviction):
            yield f"order-{order}", {"prefix_cache.eviction": order}
    if not spec.method.has_budget:
        for budget in BUDGETS:
            yield f"{COMPRESSING}-{budget}", {"compression.policy": f"{COMPRESSING}@{budget}"}
    elif isinstance(spec.budget, float):
        yield "budget-half", {"compression.policy.budget": spec.budget / 2}
        yield "budget-double", {"compression.policy.budget": min(1.0, spec.budget * 2)}
    else:
        yield "budget-half", {"compression.policy.budget": max(1, spec.budget // 2)}
        yield "budget-double", {"compression.policy.budget": spec.budget * 2}
    if config.cluster.most_replicas > 1 and routing.policy == "prefix_cost":
        yield "load-half", {"routing.load_weight": routing.load_weight / 2}
        yield "load-double", {"routing.load_weight": routing.load_weight * 2}


def combined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return both changes together; None where they are of one setting."""
    settings = {setting_of(dotted) for dotted in one}
    return None if any(setting_of(dotted) in settings for dotted in other) else {**one, **other}


class OperatorCandidates:
    """The candidates of operators, by the lowest number that is free: names label metrics, and stay few."""

    def __init__(self, kept: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._held = {name: WhatIfCandidate(name, dict(changes)) for name, changes in (kept or {}).items()}

    def all(self) -> Sequence[WhatIfCandidate]:
        return list(self._held.values())

    def kept(self) -> dict[str, Mapping[str, Any]]:
        """Return the changes of each, by its name."""
        return {name: candidate.changes for name, candidate in self._held.items()}

    def add(self, changes: Mapping[str, Any]) -> WhatIfCandidate:
        """Add changes, which are checked already; the same changes are there once. Raises TooManyCandidatesError."""
        for known in self._held.values():
            if known.changes == changes:
                return known
        free = next((str(n) for n in range(1, MOST_CANDIDATES + 1) if str(n) not in self._held), None)
        if free is None:
            raise TooManyCandidatesError(f"there are {MOST_CANDIDATES} candidates already; take one away first")
        self._held[free] = WhatIfCandidate(free, dict(changes))
        return self._held[free]

    def remove(self, name: str) -> None:
        """Take a candidate away. Raises UnknownCandidateError."""
        if self._held.pop(name, None) is None:
            known = ", ".join(self._held) or "none"
            raise UnknownCandidateError(
                f"{name!r} is no candidate of an operator (there are {known}); proposed ones go by themselves"
            )

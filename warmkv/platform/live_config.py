"""Live configuration: the settings that may be changed while the service runs, and their versions. Pure.

A version says what differs from the configuration that the service was started with, so that it can be brought into
force again on any start. Version 0 is that configuration itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import AwareDatetime, Field, model_validator

from warmkv.config import (
    CompressionConfig,
    Config,
    ConfigError,
    PricingConfig,
    RoutingConfig,
    Section,
    parse,
    put,
)
from warmkv.policy_spec import PolicySpec

_SECTIONS: dict[str, Iterable[str]] = {
    "compression": CompressionConfig.model_fields,
    "prefix_cache": ("ttls", "default_ttl"),
    "routing": RoutingConfig.model_fields,
    "pricing": PricingConfig.model_fields,
}
LIVE = tuple(f"{section}.{field}" for section, fields in _SECTIONS.items() for field in fields)
"""Settings that may be changed while the service runs."""

DESCRIBED = 200
"""Characters of a change's author, settings and reason that its mark on the dashboards shows."""


class StaleVersionError(ValueError):
    """A change that was based on a version which is not in force any more."""


class UnknownVersionError(LookupError):
    """A version that never was, or is not kept any more."""


class Version(Section):
    """A policy, and who wanted it when and why."""

    number: int = Field(0, ge=0)
    settings: dict[str, Any] = Field({}, description="all that differs from the configuration at start")
    changes: dict[str, Any] = Field({}, description="what was asked for")
    rolled_back_to: int | None = None
    who: str = ""
    when: AwareDatetime | None = None
    why: str = "the configuration at start"


class History(Section):
    """Versions, oldest first; the last one is in force."""

    versions: tuple[Version, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> History:
        numbers = [0, *(version.number for version in self.versions)]
        if numbers != sorted(set(numbers)):
            raise ValueError("the numbers of the versions do not rise")
        return self

    @property
    def current(self) -> Version:
        return self.versions[-1] if self.versions else Version()

    def find(self, number: int) -> Version:
        """Return a version by its number. Raises UnknownVersionError."""
        for version in (Version(), *self.versions):
            if version.number == number:
                return version
        kept = ", ".join(str(version.number) for version in self.versions)
        raise UnknownVersionError(f"version {number} is not kept; there are 0{', ' if kept else ''}{kept}")

    def previous(self) -> Version:
        """Return the version before the one in force. Raises UnknownVersionError."""
        if not self.versions:
            raise UnknownVersionError("nothing was changed yet")
        return self.versions[-2] if len(self.versions) > 1 else self.find(self.current.number - 1)

    def with_next(self, version: Version, keep: int) -> History:
        """Append a version and keep the last `keep`."""
        return History(versions=(*self.versions, version)[-keep:])


def in_force(start: Config, version: Version) -> Config:
    """Apply a version to the configuration that the service was started with.

    Raises ConfigError where it does not fit, with the way out.
    """
    try:
        return changed(start, version.settings)
    except ConfigError as error:
        why = "; ".join(str(error).splitlines())
        raise ConfigError(
            f"version {version.number} of the live configuration, kept from before, does not fit the settings at "
            f"start: {why}. `warmkv policy rollback --to 0` goes back to these"
        ) from None


def described(version: Version) -> dict[str, str]:
    """Return who changed what and why, as labels of a metric: one line each, never empty, of a bounded length."""
    changes = ", ".join(f"{name} = {json.dumps(value)}" for name, value in version.changes.items())
    what = changes if version.rolled_back_to is None else f"back to version {version.rolled_back_to}"
    return {
        name: _short(text) or "not given" for name, text in (("who", version.who), ("what", what), ("why", version.why))
    }


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= DESCRIBED else line[: DESCRIBED - 3] + "..."


def values(config: Config, settings: Iterable[str] = LIVE) -> dict[str, Any]:
    """Return settings as plain values, a policy in its short form."""
    found = {}
    for dotted in settings:
        section, field = dotted.split(".")
        value = getattr(getattr(config, section), field)
        plain = getattr(config, section).model_dump(mode="json", include={field})[field]
        found[dotted] = value.label if isinstance(value, PolicySpec) else plain
    return found


def change(start: Config, history: History, changes: Mapping[str, Any], based_on: int | None, **by: Any) -> Version:
    """Return the next version: dotted settings get new values, all of them or none. `by` is who, when and why.

    Raises StaleVersionError, or ConfigError with the place of every fault.
    """
    current = _check_base(history, based_on)
    config = changed(in_force(start, current), changes)
    touched = {dotted: setting_of(dotted) for dotted in changes}
    if fixed := [dotted for dotted, setting in touched.items() if setting not in LIVE]:
        raise ConfigError(f"{fixed[0]} cannot be changed while the service runs; what can: {', '.join(LIVE)}")
    kept = (dotted for dotted in current.settings if dotted in LIVE)  # a version may know settings of the past
    settings = values(config, dict.fromkeys([*kept, *touched.values()]))
    return Version(number=current.number + 1, settings=settings, changes=dict(changes), **by)


def warnings(before: Config, after: Config) -> list[str]:
    """Return what a change does that may not be meant: clients are refused, or prices are nobody's."""
    gone = [f"{name!r}" for name in before.prefix_cache.ttls if name not in after.prefix_cache.ttls]
    left = ", ".join(after.prefix_cache.ttls)
    said = [
        f"requests that mark a prefix with the TTL {name} are refused from now on; there are {left}" for name in gone
    ]
    served = after.model.name
    for model in after.pricing.models:
        if model != served and model not in before.pricing.models:
            said.append(
                f"pricing.models.{model}: this service serves {served} and bills nothing by it; it counts where a "
                "replayed log names that model"
            )
    return said


def roll_back(start: Config, history: History, to: int | None, based_on: int | None, **by: Any) -> Version:
    """Return the next version with the settings of an earlier one; `to` None is the one before the present one.

    Raises StaleVersionError, UnknownVersionError, or ConfigError where the earlier one does not fit any more.
    """
    current = _check_base(history, based_on)
    earlier = history.previous() if to is None else history.find(to)
    in_force(start, earlier)
    return Version(number=current.number + 1, settings=earlier.settings, rolled_back_to=earlier.number, **by)


def setting_of(dotted: str) -> str:
    """Return the setting that a dotted path lies in, as compression.policy of compression.policy.budget."""
    return ".".join(dotted.split(".")[:2])


def _check_base(history: History, based_on: int | None) -> Version:
    current = history.current
    if based_on not in (None, current.number):
        raise StaleVersionError(
            f"version {based_on} is not in force: version {current.number} is, by {current.who or 'nobody'} "
            f"({current.why})"
        )
    return current


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with dotted settings at new values. Raises ConfigError with the place of every fault."""
    try:
        json.dumps(changes, allow_nan=False)
    except ValueError:
        raise ConfigError("numbers must be finite") from None
    tree = config.model_dump(mode="json")
    for dotted, value in changes.items():
        put(tree, dotted, value)
    return parse(tree)

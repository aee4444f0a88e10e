"""What the autopilot does next: a pure function of its settings, the versions, the what-if table and the clock.

It takes the best candidate if the model's error is small, the gain exceeds a threshold and nothing changed lately; one
step at a time. A step is measured after a rest, and rolled back unless the measured effect is the predicted one, and at
once if requests fail under it. Values that were left lately, by whomever, are not taken again for a while: it cannot go
back and forth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from warmkv.config import AutopilotConfig, Config, ConfigError, Section
from warmkv.config.tenants import AUTOPILOT
from warmkv.platform.live_config import LIVE, Version, changed, in_force, setting_of, values
from warmkv.platform.whatif.candidates import NOW
from warmkv.simulator.studies.replays.whatif import COSTS, ENOUGH_IN_SLO, Values, differences

REQUESTS = 50  # that a measurement must rest on
LATELY = 6  # rests, within which nothing that was left is taken again
KEPT_GAIN = 0.5  # of the predicted gain, that must have come true
STEPPED = tuple(
    setting
    for setting in LIVE
    if not setting.startswith("pricing.") and not setting.rpartition(".")[2].startswith("allow_")
)
"""Settings that it may change: neither prices nor rights."""

MEASURED_AS = {"in_slo": "in_slo", "dollars_per_million_tokens": "dollars_per_million_tokens"} | {
    "bytes": "resident_bytes_end",
    "ttft_p99": "ttft_p99",
}
"""Figures that a step may be taken for, and by which of the model's errors each is judged."""


class Step(Section):
    """A change that was made and whose effect is not measured yet."""

    version: int = Field(ge=1, description="that it brought into force")
    base: int = Field(ge=0, description="version before")
    candidate: str
    at: float = Field(description="Unix time")
    figure: str = Field(description="that it is to make better")
    gain: float = Field(description="predicted")
    predicted: dict[str, float | None] = Field(description="difference to the settings before, by figure")
    before: dict[str, float | None] = Field(description="measured under the settings before")
    failed: float = Field(0.0, description="share of the requests that failed before")
    start: str = Field("", description="hash of the settings at start; empty: unknown")


@dataclass(frozen=True, slots=True)
class Seen:
    """Hold what a decision rests on. Measured are requests since the time of `since_of`, none from before `begun`."""

    now: float  # Unix time
    versions: Sequence[Version]  # the last one first
    table: Mapping[str, Any]  # as GET /v1/warmkv/whatif shows it
    measured: Values
    requests: int
    asked_since: float  # Unix time of the first request that is known
    ended: int  # requests since the step, or in the last rest: those that were answered, and those that failed
    failed: float  # share of them
    begun: float  # Unix time since which every request was seen; of those before, some may be missing


@dataclass(frozen=True, slots=True)
class Wait:
    """Change nothing."""

    why: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Bring a candidate into force."""

    changes: Mapping[str, Any]
    step: Step
    why: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """Bring the version before the step into force again."""

    step: Step
    why: str


@dataclass(frozen=True, slots=True)
class Close:
    """Keep what is in force: the step has proved itself, or somebody changed something else."""

    why: str


Decision = Wait | Apply | RollBack | Close


def since_of(settings: AutopilotConfig, step: Step | None, now: float) -> float:
    """Return the time since which requests are measured: the last rest, or since a step has settled."""
    return now - settings.settle_seconds if step is None else step.at + settings.settle_seconds


def decide(start: Config, settings: AutopilotConfig, step: Step | None, seen: Seen) -> Decision:
    """Return what to do next. `start` is the configuration that the service was started with."""
    current = seen.versions[0] if seen.versions else Version()
    if step is not None:
        return _judge(start, settings, step, seen, current)
    age = _age(current, seen.now)
    needed = 2 * settings.settle_seconds  # what a step is compared with has settled, too
    if age < needed:
        return Wait(
            f"version {current.number} by {current.who} is {age:.0f} s old, {needed:g} are needed: it settles, and is "
            "measured"
        )
    if (asked := seen.now - seen.asked_since) < needed:  # caches were empty at first
        return Wait(f"the first request was {asked:.0f} s ago, {needed:g} are needed: caches fill, and it is measured")
    if (known := seen.now - seen.begun) < settings.settle_seconds:  # this actor was started anew
        return Wait(f"requests are known for {known:.0f} s, {settings.settle_seconds:g} are needed: it is measured")
    table = seen.table
    if table["state"] != "up to date":
        return Wait(f"the what-if service is not up to date: {table['state']}")
    if table["version"] != current.number:
        return Wait(f"the what-if table is of version {table['version']}, not {current.number}")
    if seen.requests < REQUESTS:
        return Wait(f"{seen.requests} requests in the last {settings.settle_seconds:g} s, {REQUESTS} are needed")
    return _best(start, settings, seen, current)


def gain(row: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the figure that a candidate is ranked before the present by, and how much better it is; None if none.

    Requests within the SLO are compared in points, up to ENOUGH_IN_SLO, all else relative to the present.
    """
    own, present = (min(one["figures"].get("in_slo") or 0.0, ENOUGH_IN_SLO) for one in (row, now))
    if round(own, 2) != round(present, 2):
        return ("in_slo", own - present) if own > present else None
    for figure, tolerance in COSTS:
        less = -(row["difference"].get(figure) or 0.0)
        if abs(less) > tolerance:
            return (figure, less) if less > 0 else None
    return None


def _judge(start: Config, settings: AutopilotConfig, step: Step, seen: Seen, current: Version) -> Decision:
    if step.start not in ("", _hash(start)):  # figures from before say nothing about this deployment
        return Close(f"the service was started with other settings since version {step.version}")
    if current.number < step.version:
        return Close(f"version {step.version} was not made")  # the actor was restarted meanwhile
    if current.number > step.version:
        return Close(f"version {current.number} by {current.who or 'nobody'} came after version {step.version}")
    if current.who != AUTOPILOT:  # somebody was faster, while this actor or that of the versions was restarted
        return Close(f"version {current.number} is by {current.who or 'nobody'}, the step was not made")
    if seen.ended >= REQUESTS and seen.failed - step.failed > settings.max_model_error:  # figures are of the others
        said = f"{seen.failed:.1%} of {seen.ended} requests fail, {step.failed:.1%} did before"
        return RollBack(step, f"version {step.version} ({step.candidate}): {said}")
    left = max(step.at + settings.settle_seconds, seen.begun) + settings.settle_seconds - seen.now
    if left > 0:
        return Wait(f"version {step.version} settles and is measured, {left:.0f} s more")
    if seen.requests < REQUESTS:
        return Wait(f"version {step.version} is measured: {seen.requests} of {REQUESTS} requests")
    effect = differences(seen.measured, step.before)
    own = effect.get(step.figure)
    sign = 1 if step.figure == "in_slo" else -1
    said = f"predicted {_shown(step.figure, sign * step.gain)}, measured {_shown(step.figure, own)}"
    if own is None or sign * own < KEPT_GAIN * step.gain:
        return RollBack(step, f"version {step.version} ({step.candidate}) has not the predicted effect: {said}")
    for figure, worse in (("hit_rate", -1), ("in_slo", -1), ("dollars_per_million_tokens", 1)):
        predicted, found = step.predicted.get(figure), effect.get(figure)
        if predicted is None or found is None or worse * (found - predicted) <= settings.max_model_error:
            continue
        said = f"predicted {_shown(figure, predicted)}, measured {_shown(figure, found)}"
        return RollBack(step, f"version {step.version} ({step.candidate}) is worse than predicted: {said}")
    return Close(f"version {step.version} ({step.candidate}) has the predicted effect: {said}")


def _best(start: Config, settings: AutopilotConfig, seen: Seen, current: Version) -> Decision:
    """Return the step to the best candidate that may be taken, or why there is none."""
    table = seen.table
    rows = [row for row in table["candidates"] if row["rank"] is not None]
    now = next((row for row in rows if row["candidate"] == NOW), None)
    errors = (table["model_error"] or {}).get("error")
    if now is None or not errors:
        return Wait("the model's error is not known yet")
    why = "no candidate is better than the settings in force"
    for row in sorted(rows, key=lambda row: row["rank"]):
        if row is now:
            break
        found = gain(row, now)
        if found is None or found[0] not in MEASURED_AS or row["restart"]:
            continue
        figure, better = found
        error = max(
            (abs(value) if (value := errors.get(name)) is not None else 1.0)
            for name in ("hit_rate", MEASURED_AS[figure])
        )
        if (refusal := _refusal(start, settings, row, better, error, seen, current)) is not None:
            why = f"{row['candidate']}: {refusal}"
            continue
        sign = 1 if figure == "in_slo" else -1
        text = (
            f"what-if: {row['candidate']}, {_shown(figure, sign * better)} predicted from {row['requests']} requests, "
            f"model error {error:.1%}"
        )
        step = Step(
            version=current.number + 1,
            base=current.number,
            candidate=row["candidate"],
            at=seen.now,
            figure=figure,
            gain=better,
            predicted=row["difference"],
            before=seen.measured,
            failed=seen.failed,
            start=_hash(start),
        )
        return Apply(row["changes"], step, text)
    return Wait(why)


def _refusal(
    start: Config,
    settings: AutopilotConfig,
    row: Mapping[str, Any],
    better: float,
    error: float,
    seen: Seen,
    current: Version,
) -> str | None:
    """Return why a candidate is no step to take; None if it is one."""
    if row["requests"] < REQUESTS:
        return f"it was replayed with {row['requests']} requests, {REQUESTS} are needed"
    if error > settings.max_model_error:
        return f"the model's error is {error:.1%}, more than {settings.max_model_error:.1%}"
    if better < max(settings.min_gain, error):
        return f"its gain of {better:.1%} is less than {max(settings.min_gain, error):.1%}"
    touched = {setting_of(dotted) for dotted in row["changes"]}
    if not touched <= set(STEPPED):
        return f"{min(touched - set(STEPPED))} is for operators to change"
    try:
        now = in_force(start, current)
        after = changed(now, row["changes"])
    except ConfigError as fault:
        return f"it does not fit any more: {fault}"
    if after == now:
        return "it changes nothing"
    if not now.prefix_cache.ttls.keys() <= after.prefix_cache.ttls.keys():
        return "it takes a TTL away that requests may name"
    before, wanted = values(now, touched), values(after, touched)
    new = {setting: value for setting, value in wanted.items() if value != before[setting]}
    for version in _left_lately(seen, LATELY * settings.settle_seconds):
        try:
            known = values(in_force(start, version), new)
        except ConfigError:
            continue  # the gateways never had it
        if again := [setting for setting, value in new.items() if known[setting] == value]:
            return f"version {version.number} had this {again[0]}, and was left less than {LATELY} rests ago"
    return None


def _left_lately(seen: Seen, seconds: float) -> Iterator[Version]:
    """Yield the versions that were in force within the last `seconds`, but for the one that is now."""
    for number, later in enumerate(seen.versions):
        if _age(later, seen.now) > seconds:
            return
        yield seen.versions[number + 1] if number + 1 < len(seen.versions) else Version()


def _hash(start: Config) -> str:
    return hashlib.blake2b(start.model_dump_json().encode(), digest_size=8).hexdigest()


def _age(version: Version, now: float) -> float:
    return now - version.when.timestamp() if version.when else float("inf")


def _shown(figure: str, difference: float | None) -> str:
    return f"{figure} unknown" if difference is None else f"{figure} {difference:+.1%}"

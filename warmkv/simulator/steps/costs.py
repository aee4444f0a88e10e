"""What a step takes, as coefficients: for all requests alike, or measured for each phase and kind of policy."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, NamedTuple, Protocol

from warmkv import pickling
from warmkv.policy_spec import DecodeRule, PolicySpec, Storage


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step-time model: seconds = a + b * tokens computed + c * context tokens read + d * tokens * context.

    `a` seconds a step, `b` a token, `c` a context token, `d` a pair of both: attention of many tokens at once. `e`, a
    pair of tokens, is below 0 where tokens do not attend to those of their own step that come after them.
    """

    a: float
    b: float
    c: float
    d: float = 0.0
    e: float = 0.0

    @property
    def overhead(self) -> float:
        return 0.0

    @property
    def roofline_terms(self) -> tuple[StepCost, ...]:
        return (self,)

    def times(self, factor: float) -> StepCost:
        """Scale the cost by `factor`."""
        return StepCost(*(factor * coefficient for coefficient in astuple(self)))

    def seconds(self, tokens: float, context: float) -> float:
        return self.a + (self.b * tokens + self.c * context + self.d * tokens * context + self.e * tokens * tokens)

    def load(self, tokens: float, context: float) -> float:
        """Return the seconds that tokens and context add to an empty step."""
        return self.b * tokens + self.c * context + self.d * tokens * context + self.e * tokens * tokens

    def of(self, kind: StepKind) -> PhaseCosts:
        """Use one cost for every phase and kind of policy; the hand-off is free."""
        return PhaseCosts(self, self)

    def figures(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step-time model: whatever takes longest of what a step does at the same time.

    All costs of a replica have as many roofs in the same order.
    """

    roofline_terms: tuple[StepCost, ...]

    def seconds(self, tokens: float, context: float) -> float:
        return max([roof.seconds(tokens, context) for roof in self.roofline_terms])


Cost = StepCost | Roofline


def keys_per_token(cost: Cost) -> float:
    """Return the context to which a token's attention takes as long as the rest of it; inf where it takes no time."""
    return min((each.b / each.d for each in cost.roofline_terms if each.b > 0 and each.d > 0), default=math.inf)


FREE = StepCost(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PhaseCosts:
    """What the steps of a request take.

    prefill: a chunk, of `tokens` computed and `context` prompt tokens up to its own end. decode: a step of a batch, of
    `tokens` sequences and `context` entries that their slots hold. hand_off: from the prompt to a slot, once a request,
    of `tokens` entries kept and `context` prompt tokens.
    """

    prefill: Cost
    decode: Cost
    hand_off: Cost = FREE


class StepKind(NamedTuple):
    """What of a policy decides how long its steps take; its budget counts through the context."""

    method: str
    decode: DecodeRule
    storage: Storage

    @classmethod
    def of(cls, spec: PolicySpec) -> StepKind:
        return cls(spec.name, spec.decode, spec.storage)

    @property
    def label(self) -> str:
        """Return the short form of a policy without its budget, as in `snapkv+kivi4`."""
        spec = PolicySpec(name=self.method, decode=self.decode, storage=self.storage)
        return spec.label.replace(f"@{spec.budget}", "", 1)


class StepTimes(Protocol):
    """Where the simulator takes step costs from."""

    @property
    def overhead(self) -> float:
        """Return the seconds of every request outside its replica: HTTP, tokenizing, routing, the network."""
        ...

    def of(self, kind: StepKind) -> PhaseCosts: ...

    def figures(self) -> dict[str, Any]:
        """Return the coefficients, for a report."""
        ...


@dataclass(frozen=True, slots=True)
class UniformCosts:
    """The same step costs for all kinds of policy."""

    costs: PhaseCosts
    overhead: float = 0.0

    def of(self, kind: StepKind) -> PhaseCosts:
        return self.costs

    def figures(self) -> dict[str, Any]:
        return {**asdict(self.costs), "overhead_seconds": self.overhead}


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Step costs of the kinds that were measured; any other takes those of the nearest."""

    measured: Mapping[StepKind, PhaseCosts]
    overhead: float = 0.0

    def of(self, kind: StepKind) -> PhaseCosts:
        return self.measured[self.nearest(kind)]

    def nearest(self, kind: StepKind) -> StepKind:
        """Find the nearest kind: stored alike counts most, then decoded alike, then selecting at all."""
        if kind in self.measured:
            return kind
        return min(
            self.measured,
            key=lambda other: (
                other.storage != kind.storage,
                other.decode != kind.decode,
                other.method != kind.method,
                (other.method == "full") != (kind.method == "full"),
            ),
        )

    def figures(self) -> dict[str, Any]:
        return {kind.label: asdict(costs) for kind, costs in self.measured.items()}


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Hold the step times of several kinds of replicas, by their group; its own are those of the group ""."""

    groups: Mapping[str, StepTimes]

    @property
    def overhead(self) -> float:
        return self.groups[""].overhead

    def of(self, kind: StepKind) -> PhaseCosts:
        return self.groups[""].of(kind)

    def figures(self) -> dict[str, Any]:
        return {name or "replica": times.figures() for name, times in self.groups.items()}


# Workers of a sweep get these.
pickling.by_fields(StepCost, Roofline, PhaseCosts, UniformCosts, MeasuredCosts, GroupTimes)


def times_of(times: StepTimes, group: str) -> StepTimes:
    """Return the step times of a group of replicas."""
    return times.groups[group] if isinstance(times, GroupTimes) else times


def batch_seconds(loads: Sequence[tuple[Cost, float, float]]) -> float:
    """Return the seconds of a step that computes several kinds together, each with its cost, tokens and context.

    What a step takes by itself is taken once: the model runs once for all of them.
    """
    seconds = []
    for roof in range(len(loads[0][0].roofline_terms)):
        kinds = [(cost.roofline_terms[roof], tokens, context) for cost, tokens, context in loads]
        added = sum(cost.load(tokens, context) for cost, tokens, context in kinds)
        seconds.append(max(cost.a for cost, _, _ in kinds) + added)
    return max(seconds)


Line = tuple[float, float]  # seconds of the first of some steps under a roof, and what each takes more than the last


def run_seconds(lines: Sequence[Line], steps: int) -> float:
    """Sum the seconds of `steps` steps, each as long as the higher of at most two non-decreasing lines."""
    if len(lines) == 1:
        ((first, growth),) = lines
        return steps * first + growth * (steps * (steps - 1) / 2)
    (later, steep), (first, growth) = sorted(lines)  # the lower one may be the steeper and come to lie above
    gap, gain = first - later, steep - growth
    before = math.ceil(gap / gain) if gain * steps > gap else steps
    after = steps - before
    total = before * first + growth * (before * (before - 1) / 2)
    return total + after * (later + steep * before) + steep * (after * (after - 1) / 2)


def steps_until(lines: Sequence[Line], since: float, until: float, most: int) -> int:
    """Return the least number of steps begun at `since` after which it is `until` or later, from 1 to `most`."""

    def end(steps: int) -> float:
        return since + run_seconds(lines, steps)

    if len(lines) > 1:
        return 1 + bisect_left(range(1, most), until, key=end)
    ((first, growth),) = lines  # a quadratic equation gives the number, but for rounding
    half, left = growth / 2, max(0.0, until - since)
    root = first - half + math.sqrt((first - half) ** 2 + 4 * half * left)
    steps = max(1, math.ceil(min(most, 2 * left / root))) if root > 0 else 1
    while steps > 1 and end(steps - 1) >= until:
        steps -= 1
    while steps < most and end(steps) < until:
        steps += 1
    return steps

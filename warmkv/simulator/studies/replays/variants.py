"""What a replay may change about the service: how long prefixes live, and what requests keep of their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from warmkv.config import describe
from warmkv.faults import UserError
from warmkv.policy_spec import METHODS, PolicySpec

TTLS = (300.0, 3600.0)
BUDGETS: tuple[int | float, ...] = (0.2, 0.5)
POLICIES = ("snapkv", "streaming_llm")


class VariantError(UserError):
    """A variant that cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One what-if. None leaves a thing as the log and the configuration have it."""

    ttl: float | None = None  # seconds, for every mark and every block
    policy: PolicySpec | None = None  # for every request

    def __post_init__(self) -> None:
        if self.ttl is not None and not self.ttl > 0:
            raise VariantError(f"a TTL must be a positive number of seconds, got {self.ttl}")

    @property
    def label(self) -> str:
        return self.policy.label if self.policy else "as recorded"


def policy_spec(name: str, budget: int | float, base: PolicySpec) -> PolicySpec:
    """Build the policy `name` at `budget`, with those knobs of `base` that it has. Raises VariantError."""
    knobs = {knob.name: getattr(base, knob.name) for knob in METHODS[base.name].knobs} if name == base.name else {}
    try:
        return PolicySpec.model_validate({"name": name, "budget": budget, **knobs})
    except ValidationError as error:
        raise VariantError(f"policy {name} at budget {budget}: {'; '.join(describe(error, PolicySpec))}") from None


def _has_budget(name: str) -> bool:
    try:
        return PolicySpec.model_validate({"name": name}).method.has_budget
    except ValidationError:  # which is told with the budget
        return True


def grid(
    base: PolicySpec,
    ttls: Sequence[float] = TTLS,
    budgets: Sequence[int | float] = BUDGETS,
    policies: Sequence[str] = POLICIES,
    whole: PolicySpec = PolicySpec(),
) -> list[Variant]:
    """Build the variants: the `whole` cache at every TTL as the baseline, then every policy at every budget and TTL.

    A policy that has no budget is one variant for each TTL.
    """
    variants = [Variant(ttl, whole) for ttl in ttls]
    for name in policies:
        if name != "full":
            own = budgets if _has_budget(name) else (1.0,)
            variants += [Variant(ttl, policy_spec(name, budget, base)) for budget in own for ttl in ttls]
    return variants


def price_tier(ttl: float, ttls: Mapping[str, float]) -> str:
    """Return the TTL name that a lifetime of `ttl` seconds is sold under: the shortest as long, else the longest."""
    enough = [name for name in ttls if ttls[name] >= ttl]
    return min(enough, key=lambda name: ttls[name]) if enough else max(ttls, key=lambda name: ttls[name])

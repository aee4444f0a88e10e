"""Measured step times as a file: `warmkv profile` writes it, the simulator reads it. One definition for both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from warmkv.config import Section, describe
from warmkv.faults import UserError
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.simulator.steps.costs import MeasuredCosts, PhaseCosts, StepCost, StepKind

Phase = Literal["prefill", "decode", "hand_off"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "hand_off")
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileError(UserError):
    """A file that is not a profile; the message says where."""


class ErrorOfFit(Section):
    """How far predictions are from what was measured, as a share of the latter: |predicted - measured| / measured."""

    mean: Share
    p95: Share


class FittedCost(Section):
    """The coefficients of a phase, as in `StepCost`, and how well they fit."""

    a: Seconds
    b: Seconds
    c: Seconds
    d: Seconds = 0.0
    points: int = Field(ge=1, description="measured places of the grid")
    in_sample: ErrorOfFit
    out_of_sample: ErrorOfFit = Field(description="of every place when all but it are fitted")

    @property
    def cost(self) -> StepCost:
        return StepCost(self.a, self.b, self.c, self.d)


class PolicyProfile(Section):
    """The step costs of a kind of policy."""

    policy: str = Field(description="short form without a budget, as in snapkv+kivi4")
    prefill: FittedCost
    decode: FittedCost
    hand_off: FittedCost

    @field_validator("policy")
    @classmethod
    def _known(cls, label: str) -> str:
        PolicySpec.model_validate(label)
        return label

    @property
    def kind(self) -> StepKind:
        return StepKind.of(PolicySpec.model_validate(self.policy))


class Measurement(Section):
    """A place of the grid: seconds of a step, median and range over repeats. The fit is to the least."""

    policies: tuple[str, ...] = Field(description="those for which it counts")
    phase: Phase
    tokens: float
    context: float
    seconds: Seconds
    least: Seconds
    most: Seconds


class ProfiledModel(Section):
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    def matches(self, shape: KVShape) -> bool:
        """Return True if a KV cache of this shape could be the model's."""
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype_bytes)
        return sizes == (self.layers, self.kv_heads, self.head_dim, self.dtype_bytes)


class StepProfile(Section):
    """The document: whose step times these are, the fits, and what they were fitted to."""

    format: Literal[1] = 1
    formula: str = "seconds = a + b * tokens + c * context + d * tokens * context"
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    model: ProfiledModel
    prefill_chunk: int = Field(ge=1, description="largest chunk that was measured")
    policies: tuple[PolicyProfile, ...] = Field(min_length=1)
    measurements: tuple[Measurement, ...] = ()

    def costs(self) -> MeasuredCosts:
        return MeasuredCosts(
            {p.kind: PhaseCosts(p.prefill.cost, p.decode.cost, p.hand_off.cost) for p in self.policies}
        )

    @property
    def disturbance(self) -> float:
        """Return by how much the median of repeats exceeded the least, as a share, on average: near 0 on an idle
        machine.
        """
        shares = [one.seconds / one.least - 1 for one in self.measurements if one.least]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def summary(self) -> str:
        """Name the origin of the times in a line."""
        where = self.machine.get("gpu") or self.machine.get("cpu") or "an unnamed machine"
        errors = ", ".join(
            f"{phase} {max(getattr(p, phase).out_of_sample.mean for p in self.policies):.0%}"
            for phase in ("prefill", "decode")
        )
        return f"{self.model.name} on {where}, mean error out of sample {errors}"


def read(path: Path) -> StepProfile:
    """Read a profile. Raises ProfileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{path} is not UTF-8 text") from None
    try:
        return StepProfile.model_validate_json(text)
    except ValidationError as error:
        first = describe(error, StepProfile)[0]
        raise ProfileError(f"{path} is not a profile of `warmkv profile`: {first}") from None


def write(profile: StepProfile, path: Path) -> None:
    """Write a profile. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")

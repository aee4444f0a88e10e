"""What is measured, checked before anything is loaded. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from warmkv.faults import UserError
from warmkv.policies import budgets
from warmkv.policies.memory_plan import Limit
from warmkv.policies.slot_sizes import KVShape, slot_bytes
from warmkv.policy_spec import METHODS, STORAGES, PolicySpec

FEWEST_NEW = 8
"""New tokens of a sequence whose decode steps are timed: the first come from the prompt and the warm-up."""
PROFILED_TOKENS = 16
"""New tokens of the sequences of a profile."""
SHORTEST = 16
LENGTHS_SPAN = 16
"""How many times longer than the shortest context of a profile the longest is."""


class MeasureError(UserError):
    """Something that cannot be measured as asked; the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The cells of `warmkv bench`: every policy at every prompt length and batch."""

    policies: tuple[str, ...] = ("full", "snapkv@256", "snapkv@512", "streaming_llm@256", "h2o@256", "full+kivi4")
    lengths: tuple[int, ...] = (1024, 2048, 3072)  # prompt tokens
    batches: tuple[int, ...] = (1, 4, 8)  # sequences that decode together
    new_tokens: int = 32  # of each sequence; also what its slot has room for
    repeats: int = 5
    seed: int = 0
    prefill: bool = True  # whether prompts are computed, too: minutes, for long ones on a CPU

    def __post_init__(self) -> None:
        self.specs()
        _check_counts(self.lengths, self.batches, self.repeats)
        if self.new_tokens < FEWEST_NEW:
            raise MeasureError(f"--new-tokens must be at least {FEWEST_NEW}, got {self.new_tokens}")

    def specs(self) -> dict[str, PolicySpec]:
        """Return policies by label."""
        return read_policies(self.policies)

    def check(self, max_context: int, model: str) -> None:
        """Check lengths against the model's context. Raises MeasureError."""
        most = max_context - self.new_tokens
        if (longest := max(self.lengths)) > most:
            raise MeasureError(
                f"{model} takes {max_context} tokens: with {self.new_tokens} new ones, lengths go up to {most}, "
                f"got {longest}"
            )

    def check_memory(self, shape: KVShape, kv: Limit) -> None:
        """Check that the slots of every cell fit engine.kv_bytes. Raises MeasureError."""
        for label, spec in self.specs().items():
            tokens, batch = max(self.lengths), max(self.batches)
            needed = batch * slot_bytes(budgets.in_force(spec, tokens, self.new_tokens), shape, tokens, self.new_tokens)
            if needed > kv.bytes:
                raise MeasureError(
                    f"{batch} sequences of {tokens} tokens under {label} need {needed:,} bytes, engine.kv_bytes is "
                    f"{'auto = ' * kv.auto}{kv.bytes:,}; give --set "
                    f"engine.kv_bytes={-(-needed * 5 // 4 >> 30)}GiB, or less to measure"
                )


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """The grid of `warmkv profile`. Budgets are no part of it: slots are filled at several shares of each length."""

    policies: tuple[str, ...] = ("full", "snapkv", "streaming_llm", "h2o", "full+kivi4")
    lengths: tuple[int, ...] = ()  # contexts, in tokens; none: spread over the model's context
    batches: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 5
    seed: int = 0
    points: int = 6  # contexts, where `lengths` are not given

    def __post_init__(self) -> None:
        for label, spec in self.specs().items():
            if spec.method.delegates:
                raise MeasureError(f"{label} stands for other policies; name those that it chooses from")
            if spec.budget != 1.0:
                raise MeasureError(f"policy {label}: leave the budget out; a profile covers all of them")
        _check_counts(self.lengths or (SHORTEST,), self.batches, self.repeats)

    def specs(self) -> dict[str, PolicySpec]:
        """Return policies by label."""
        return {label.replace("@1.0", "", 1): spec for label, spec in read_policies(self.policies).items()}

    def on(self, max_context: int, model: str) -> ProfilePlan:
        """Choose the plan's lengths within a model's context. Raises MeasureError."""
        most = max_context - PROFILED_TOKENS
        if self.lengths:
            if max(self.lengths) > most:
                raise MeasureError(
                    f"{model} takes {max_context} tokens: lengths go up to {most}, got {max(self.lengths)}"
                )
            return self
        least = max(SHORTEST, most // LENGTHS_SPAN)
        ratio = (most / least) ** (1 / (self.points - 1))
        return replace(self, lengths=tuple(round(least * ratio**at) for at in range(self.points)))


Plan = TypeVar("Plan", BenchPlan, ProfilePlan)

QUICK_BENCH = {
    "policies": ("full", "snapkv@256", "h2o@256", "full+kivi4"),
    "lengths": (1024, 2048),
    "batches": (1, 4),
    "new_tokens": 16,
    "repeats": 3,
}
QUICK_PROFILE = {"policies": ("full", "snapkv", "full+kivi4"), "points": 4, "batches": (1, 4), "repeats": 5}


def make(kind: type[Plan], quick: dict[str, Any], given: dict[str, Any]) -> Plan:
    """Take the defaults, then those of a quick run, then what was given (None was not). Raises MeasureError."""
    return kind(**{**quick, **{key: value for key, value in given.items() if value is not None}})


def read_policies(labels: Iterable[str]) -> dict[str, PolicySpec]:
    """Read policies by their short form, each once. Raises MeasureError."""
    specs = [_read_policy(label) for label in labels]
    if not specs:
        raise MeasureError("name a policy, as in --policies full,snapkv@512")
    return {spec.label: spec for spec in specs}


def _read_policy(text: str) -> PolicySpec:
    try:
        return PolicySpec.model_validate(text)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        if re.split(r"[@+:]", text)[0] not in METHODS:
            reason = f"there are {', '.join(METHODS)}, and full+kivi4 and the like with {', '.join(STORAGES)}"
        raise MeasureError(f"policy {text}: {reason}") from None


def split_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse `1,4,8` as numbers; None stays None. Raises MeasureError."""
    if text is None:
        return None
    try:
        return tuple(int(piece) for piece in text.split(",") if piece.strip())
    except ValueError:
        raise MeasureError(f"{option} {text}: write whole numbers with commas between them") from None


def _check_counts(lengths: Sequence[int], batches: Sequence[int], repeats: int) -> None:
    if not lengths or min(lengths) < SHORTEST:
        raise MeasureError(f"lengths are tokens, at least {SHORTEST}, got {', '.join(map(str, lengths)) or 'none'}")
    if not batches or min(batches) < 1:
        raise MeasureError(f"batches are numbers of sequences, got {', '.join(map(str, batches)) or 'none'}")
    if repeats < 1:
        raise MeasureError(f"--repeats must be at least 1, got {repeats}")

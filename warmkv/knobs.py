"""Knobs of compression policies: numbers and choices that a method or a decode rule can be given.

A name means the same wherever it is used: methods share the knobs here, each with a default of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Knob:
    """A field of PolicySpec: the type and limits that pydantic checks, and the default of the method that has it."""

    name: str
    type: Any
    default: Any
    description: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    odd: bool = False

    def by_default(self, default: Any) -> Knob:
        """Return the knob with another default."""
        return replace(self, default=default)


SINKS = Knob("sinks", int, 4, "first tokens that are never given up", ge=0, le=4096)
HEAVY = Knob("heavy", float, 0.5, "share of an argmin budget that is not the most recent", ge=0, le=1)
WINDOW = Knob("window", int, 32, "last prompt tokens that vote", ge=1, le=4096)
KERNEL = Knob("kernel", int, 5, "width of the pooling along positions, odd", ge=1, le=1023, odd=True)
POOLING = Knob("pooling", Literal["avg", "max"], "avg")
VOTES: tuple[Knob, ...] = (WINDOW, KERNEL, POOLING)

PROTECT = 0.1
"""Share of the budget that `+protect` reserves at each end of the prompt."""

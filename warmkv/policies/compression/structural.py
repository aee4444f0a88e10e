"""Structural protection (arXiv 2605.18053): both ends of the prompt are kept before any scorer picks."""

from __future__ import annotations

from warmkv.policies.budgets import share


def protect(ends: tuple[int, int], part: float, budget: int) -> tuple[int, int]:
    """A scorer's ends, at least `part` of the budget each, and together within the budget.

    Where both do not fit, the end of the prompt gives way to the beginning, down to its own protected part.
    """
    reserved = min(share(part, budget), budget // 2)
    first = min(max(ends[0], reserved), budget - reserved)
    return first, max(min(ends[1], budget - first), reserved)

"""Structural protection (Garcia, 2026, arXiv 2605.18053): no scorer evicts from either end of the sequence.

At the hand-off these are the ends of the prompt; while decoding, the beginning and the newest tokens.
"""

from __future__ import annotations


def protect(ends: tuple[int, int], reserved: int, budget: int) -> tuple[int, int]:
    """Return a scorer's ends, at least `reserved` tokens each, and together within the budget.

    Where both do not fit, the end of the prompt gives way to the beginning, down to its own protected part.
    """
    first = min(max(ends[0], reserved), budget - reserved)
    return first, max(min(ends[1], budget - first), reserved)

"""The better side of each figure of a replay, and what figures say where no request was served."""

from __future__ import annotations

from collections.abc import Mapping

Figures = dict[str, float]
Values = Mapping[str, float | None]  # figures by name; None: unknown

_MORE_IS_BETTER = ("hit_rate", "saving", "goodput", "in_slo", "quality", "reused")
_NEITHER = (
    "requests",
    "fetches",
    "fetched_bytes",
    "handed_bytes",
    "seconds",
    "prompt_tokens",
    "output_tokens",
    "dollars_uncached",
    "read_tokens",
    "written_tokens",
)
_WITHOUT_ANSWERS = ("refused", "refused_too_large", "failed", "in_slo", "gpu_hours", "gpu_dollars")
"""Figures with a better side that say something where no request was served."""


def serves_none(figures: Values) -> bool:
    """Return True if every request of a replay was refused or failed."""
    requests = figures.get("requests")
    ended = (figures.get("refused") or 0.0) + (figures.get("failed") or 0.0)
    return requests is not None and 0 < requests <= ended


def served_figures(figures: Values) -> dict[str, float | None]:
    """Return figures without those of answers where there were none: no time and no bill are no merit."""
    if not serves_none(figures):
        return dict(figures)
    return {name: value if not sense(name) or name in _WITHOUT_ANSWERS else None for name, value in figures.items()}


def sense(name: str) -> int:
    """Return 1 where more of a figure is better, -1 where less is, 0 where neither."""
    if name in _NEITHER:
        return 0
    return 1 if name.startswith(_MORE_IS_BETTER) else -1

"""Which way each figure of a replay is better."""

from __future__ import annotations

Figures = dict[str, float]

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


def sense(name: str) -> int:
    """Return 1 where more of a figure is better, -1 where less is, 0 where neither."""
    if name in _NEITHER:
        return 0
    return 1 if name.startswith(_MORE_IS_BETTER) else -1

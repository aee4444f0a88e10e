"""Figures of a replay as people read them."""

from __future__ import annotations

UNKNOWN = "unknown"


def figure_text(name: str, value: float | None) -> str:
    """Format a figure by its name; None is unknown."""
    if value is None:
        return UNKNOWN
    if name.startswith(("hit_rate", "saving", "quality")):
        return f"{value:.1%}"
    if name.startswith("dollars"):
        return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"
    if "_bytes_" in name:
        return f"{value / 2**20:,.1f} MiB"
    if name.startswith(("ttft", "tpot", "e2e")):
        return f"{value * 1e3:,.1f} ms" if value < 10 else f"{value:,.1f} s"
    return f"{value:,.0f}" if value >= 1e4 or value == int(value) else f"{value:.4g}"

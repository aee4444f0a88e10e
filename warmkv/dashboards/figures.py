"""Figures of several metrics that more than one dashboard shows, as PromQL."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.queries import rate

# What the prompts would have cost without a cache: all their tokens at the price of an input token. That price is
# read off the metrics themselves, so that a dashboard never holds a second copy of it.
WITHOUT_CACHE = "({} / {} * {} * 3600)".format(
    rate(t.DOLLARS, part="input"),
    rate(t.TOKENS, kind="input"),
    rate(t.TOKENS, kind="!output"),
)
WITH_CACHE = f"({rate(t.DOLLARS, part='!output')} * 3600)"


def hit_rate(by: tuple[str, ...] = ("application",)) -> str:
    """Return the share of the prompt tokens whose KV was reused; 0 and not a gap where none ever was."""
    prompt = rate(t.TOKENS, by, kind="!output")
    return f"({rate(t.CACHED_TOKENS, by)} or 0 * {prompt}) / {prompt}"

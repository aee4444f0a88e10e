"""Figures of several metrics that more than one panel shows, as PromQL."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.queries import level, rate

By = tuple[str, ...]
APPLICATION: By = ("application",)

# The price of an input token is read off the metrics themselves, so that a dashboard never holds a second copy of it.
_INPUT_PRICE = f"({rate(t.DOLLARS, part='input')} / {rate(t.TOKENS, kind='input')})"


def without_cache(by: By = APPLICATION) -> str:
    """Return dollars per hour for prompts if every token of theirs were a plain input token."""
    prompt = rate(t.TOKENS, by, kind="!output")
    join = "*" if by == APPLICATION else "* on (application) group_left ()"
    return f"({prompt} {join} {_INPUT_PRICE} * 3600)"


def with_cache(by: By = APPLICATION) -> str:
    """Return dollars per hour for prompts as billed."""
    return f"({rate(t.DOLLARS, by, part='!output')} * 3600)"


def spent(by: By = APPLICATION) -> str:
    """Return dollars per hour for prompts and answers."""
    return f"{rate(t.DOLLARS, by)} * 3600"


def failed(by: By = APPLICATION) -> str:
    """Return the share of the requests that ended with an error of the service; 0 and not a gap where none ever did."""
    ended = rate(t.REQUESTS, by)
    return f"({rate(t.REQUESTS, by, status='error')} or 0 * {ended}) / {ended}"


def saved(by: By = APPLICATION) -> str:
    """Return dollars per hour that the cache saves; negative while prefixes are written and not yet read."""
    return f"{without_cache(by)} - {with_cache(by)}"


def hit_rate(by: By = APPLICATION) -> str:
    """Return the share of the prompt tokens whose KV was reused; 0 and not a gap where none ever was."""
    prompt = rate(t.TOKENS, by, kind="!output")
    return f"({rate(t.CACHED_TOKENS, by)} or 0 * {prompt}) / {prompt}"


def slots_used(by: By = APPLICATION) -> str:
    """Return the share of their memory that decode slots and prefill workspaces take."""
    used = f"({level(t.KV_BYTES, by, use='slots')} + {level(t.KV_BYTES, by, use='workspace')})"
    return f"{used} / {level(t.SLOT_LIMIT_BYTES, by)}"

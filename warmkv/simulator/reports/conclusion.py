"""What follows from replays side by side, in a sentence each for lifetimes and for compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from warmkv.simulator.studies.replays.replay import Result

LEAST_POINTS = 0.01
"""Difference of hit rates from which on it is told; a replay of another hour differs by as much."""
LEAST_RATIO = 0.1
"""Difference of memory, relative, from which on it is told."""


def conclude(results: Sequence[Result]) -> list[str]:
    """Return what the replays say about TTLs and policies, or why they say nothing. Never empty."""
    if len(results) < 2:
        return ["Nothing to compare: this is one variant. Name others with --ttl, --policy and --budget."]
    if not any(result.prompt_tokens for result in results):
        return ["Nothing can be concluded: no request was served."]
    said = [sentence for sentence in (_about_ttl(results), _about_policy(results)) if sentence]
    if said:
        return said
    kinds = [(result.policy, result.ttl) for result in results]
    if not any((a[0] == b[0]) != (a[1] == b[1]) for a, b in combinations(kinds, 2)):
        return ["Nothing can be concluded: no two variants differ in the TTL or in the policy alone."]
    return [
        f"Nothing can be concluded: hit rates differ by less than {LEAST_POINTS * 100:.0f} point, and memory by less "
        f"than {LEAST_RATIO:.0%}."
    ]


def duration(seconds: float) -> str:
    """Return a lifetime as it is written in settings: 300 s are 5m, 3600 s are 1h."""
    if math.isinf(seconds):
        return "unlimited"
    for size, unit in ((3600, "h"), (60, "m")):
        if size <= seconds < size * 10**6 and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:.15g}s"


def _about_ttl(results: Sequence[Result]) -> str | None:
    """Compare the shortest TTL with the one whose hit rate is farthest from its own, under one policy."""
    of = [result for result in results if result.ttl is not None and result.prompt_tokens]
    of = sorted((one for one in of if one.policy == of[0].policy), key=lambda one: one.ttl or 0.0)
    if len(of) < 2:
        return None
    short = of[0]
    other = max(of[1:], key=lambda one: abs(one.token_hit_rate - short.token_hit_rate))
    points = other.token_hit_rate - short.token_hit_rate
    hits = f"{points * 100:+.1f} points hit rate"
    if abs(points) < LEAST_POINTS:
        other = max(of[1:], key=lambda one: abs(one.stored.peak - short.stored.peak))
        if abs(other.stored.peak - short.stored.peak) < LEAST_RATIO * short.stored.peak:
            return None
        hits = "the same hit rate"
    change = f"TTL {duration(other.ttl or 0.0)} instead of {duration(short.ttl or 0.0)}: {hits}"
    if caveat := _caveat(short, other):
        return change + caveat
    bill = other.dollars / short.dollars - 1 if short.dollars else 0.0
    billed = f", bills {bill:+.0%}" if abs(bill) >= LEAST_POINTS else ""
    if short.keeps_by_lru:
        return f"{change}{billed}; vLLM computes and holds the same."
    return f"{change} for {_times(other.stored.peak, short.stored.peak)} memory{billed}."


def _about_policy(results: Sequence[Result]) -> str | None:
    """Compare the policy with the smallest slots with the first one, under the first TTL."""
    first = next((result for result in results if result.ttl is not None), results[0])
    others = [one for one in results if one.ttl == first.ttl and one.policy != first.policy]
    if not others or not first.slots.peak:
        return None
    least = min(others, key=lambda one: one.slots.peak)
    if abs(least.slots.peak / first.slots.peak - 1) < LEAST_RATIO:
        return None
    slots = f"{_times(least.slots.peak, first.slots.peak)} slot memory"
    return f"{least.policy} instead of {first.policy}: {slots}" + (
        _caveat(first, least) or " (answers: `warmkv eval`)."
    )


def _caveat(one: Result, other: Result) -> str:
    """Return the end of a sentence that compares variants which refused different requests; empty if they did not."""
    return ", but other requests were refused: compare nothing else." if one.refused != other.refused else ""


def _times(size: float, base: float) -> str:
    """Return a size as a multiple of another."""
    if not base:
        return "the same" if not size else f"{size / 2**20:,.0f} MiB instead of no"
    ratio = size / base
    if abs(ratio - 1) < LEAST_RATIO / 2:
        return "the same"
    return f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"

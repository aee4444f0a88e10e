"""Breakpoints of a prompt: where prefixes may be read and written, and how the tokens are billed.

Positions are token counts from the start of the prompt. The rules are the prompt-caching contract of the Messages
API: writes happen only at breakpoints; a read checks a breakpoint and the positions before it, `lookback` in all.

    request --> breakpoints --> plan: what is read and written, by name --> replica: hit, written --> bill: usage
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from warmkv.prefixes import hashing
from warmkv.prefixes.record import Candidate, Mark
from warmkv.prefixes.usage import Usage

LOOKBACK = 20  # positions that are checked for an earlier write, the breakpoint's own being the first
OTHER_REST = 1 << 31  # no vocabulary has so many tokens


class BreakpointError(ValueError):
    """Marks that the contract refuses; the message is what the client is told."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a marked content block: `position` tokens from the start, kept for the TTL of that name."""

    position: int
    ttl: str


def check_marks(ttls: Sequence[str | None], known: Mapping[str, float], maximum: int) -> None:
    """Refuse too many marks, unknown TTLs, and a longer TTL after a shorter one.

    `ttls` has an item per content block in prompt order, None where the block is not marked.
    """
    marks = [ttl for ttl in ttls if ttl is not None]
    if len(marks) > maximum:
        raise BreakpointError(f"A maximum of {maximum} blocks with cache_control may be provided. Found {len(marks)}.")
    for ttl in marks:
        if ttl not in known:
            raise BreakpointError(f"cache_control.ttl: {ttl!r} is not one of {', '.join(map(repr, known))}.")
    for earlier, later in itertools.pairwise(marks):
        if known[later] > known[earlier]:
            raise BreakpointError(
                f"cache_control.ttl: a block with ttl {later!r} must not come after a block with ttl {earlier!r}."
            )


def breakpoints(ends: Sequence[int], ttls: Sequence[str | None], min_tokens: int) -> tuple[Breakpoint, ...]:
    """Return the marks that count, in order: those with at least `min_tokens` tokens before them.

    `ends[i]` is the position behind content block i, `ttls[i]` its mark or None.
    """
    return tuple(
        Breakpoint(end, ttl)
        for end, ttl in zip(ends, ttls, strict=True)
        if ttl is not None and end >= max(1, min_tokens)
    )


def read_candidates(
    ends: Sequence[int], marks: Sequence[Breakpoint], lookback: int = LOOKBACK, joined: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return the ends of content blocks at which an earlier write may be read, highest first.

    Each mark checks `lookback` positions, its own and those before it. A position is the end of a content block, or of
    a run of them: where `joined[i]`, block i is in one position with block i - 1. Of a run every end up to the mark is
    checked. `ends` ascend; equal ends are one position.
    """
    numbers: dict[int, int] = {}  # end -> number of its position
    number = 0
    for end, same in itertools.zip_longest(ends, joined, fillvalue=False):
        if end not in numbers:
            number += not same
            numbers[end] = number
    ordered, positions = list(numbers), list(numbers.values())
    found: set[int] = set()
    for mark in marks:
        first = bisect_left(positions, numbers[mark.position] - lookback + 1)
        found.update(end for end in ordered[first : bisect_right(ordered, mark.position)] if end > 0)
    return tuple(sorted(found, reverse=True))


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What of a prompt may be read and written, and under which names."""

    hashes: tuple[bytes, ...]  # of the prompt's full blocks
    marks: tuple[Mark, ...]
    reads: tuple[Candidate, ...]  # highest position first


def plan(
    tokens: Sequence[int],
    ends: Sequence[int],
    marks: Sequence[Breakpoint],
    root: bytes,
    *,
    block_size: int,
    lookback: int = LOOKBACK,
    joined: Sequence[bool] = (),
    other_from: int | None = None,
    other: str = "",
    known: Sequence[bytes] = (),
) -> CachePlan:
    """Name the prefixes of a prompt whose chain of hashes begins at `root`; `ends` are those of its content blocks.

    `lookback` and `joined` are those of `read_candidates`.

    `known` are the hashes of its leading blocks that have been computed already.
    Prefixes that go beyond `other_from` have names of their own for each `other`, as if their tokens were other ones:
    what is not in the tokens but changes the messages, such as the tool choice, must not let them be read.
    """
    if other_from is not None:
        changed = tokens[other_from] ^ int.from_bytes(hashing.chained(b"", other.encode())[:4], "little") | OTHER_REST
        tokens = [*tokens[:other_from], changed, *tokens[other_from + 1 :]]
        known = known[: other_from // block_size]
    rest = tokens[len(known) * block_size :]
    hashes = [*known, *hashing.block_hashes(rest, block_size, known[-1] if known else root)]
    name = partial(hashing.prefix_key, tokens, block_size=block_size, hashes=hashes, root=root)
    return plan_of(hashes, marks, read_candidates(ends, marks, lookback, joined), name)


def plan_of(
    hashes: Sequence[bytes], marks: Sequence[Breakpoint], reads: Sequence[int], name: Callable[[int], bytes]
) -> CachePlan:
    """Name what may be read and written, at the positions `reads`, which have the marks', by the exact prefix there."""
    candidates = tuple(Candidate(at, name(at)) for at in reads)
    keys = {read.position: read.key for read in candidates}
    written = tuple(Mark(mark.position, mark.ttl, keys[mark.position]) for mark in marks)
    return CachePlan(tuple(hashes), written, candidates)


def billed(
    prompt_tokens: int, marks: Sequence[Mark], found: int, written: int, read: int, lifetimes: Mapping[str, float]
) -> Usage:
    """Bill the prompt of a request with breakpoints, as its answer begins.

    `found` is the highest breakpoint that was there, `written` the highest that is stored now, `read` the position up
    to which the request is a reader (`Writers.began`). What memory did not suffice for is not billed as written.
    """
    return bill(prompt_tokens, [mark for mark in marks if mark.position <= max(found, written)], read, lifetimes)


def bill(prompt_tokens: int, marks: Sequence[Breakpoint | Mark], hit: int, lifetimes: Mapping[str, float]) -> Usage:
    """Split a prompt for billing: read up to `hit`, then write up to the last mark of each TTL, longest first.

    With TTLs 5m and 1h: A = hit, B = the last 1h mark after A (else A), C = the last mark (else A); A is read, B-A is
    written for 1h, C-B for 5m, the rest is ordinary input.
    """
    position = hit
    written: dict[str, int] = {}
    for ttl in sorted(lifetimes, key=lifetimes.__getitem__, reverse=True):
        last = max([mark.position for mark in marks if mark.ttl == ttl], default=0)
        written[ttl] = max(0, last - position)
        position = max(position, last)
    return Usage(input=prompt_tokens - position, read=hit, written=written)

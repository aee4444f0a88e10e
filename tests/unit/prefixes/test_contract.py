"""The pure part of the contract as a whole: requests of tenants over time, against a model that knows tokens only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes import hashing
from warmkv.prefixes.breakpoints import Breakpoint, bill, breakpoints, plan
from warmkv.prefixes.usage import Usage

TTLS = {"5m": 5.0, "1h": 60.0}
BLOCKS = st.lists(st.lists(st.integers(0, 1), max_size=3).map(tuple), min_size=1, max_size=7)


@dataclass(frozen=True)
class Request:
    tenant: str
    blocks: tuple[tuple[int, ...], ...]
    ttls: tuple[str | None, ...]
    head: int  # blocks of tools and system
    choice: str  # the tool choice; empty for the default
    after: float  # seconds since the request before

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*(token for block in self.blocks for token in block), 7)  # the template's end

    @property
    def ends(self) -> list[int]:
        return [sum(map(len, self.blocks[: i + 1])) for i in range(len(self.blocks))]

    @property
    def head_end(self) -> int:
        return self.ends[self.head - 1] if self.head else 0


@st.composite
def requests(draw):
    blocks = tuple(draw(BLOCKS))
    marked = sorted(draw(st.sets(st.integers(0, len(blocks) - 1), max_size=4)))
    long = draw(st.integers(0, len(marked)))
    names = {at: "1h" if number < long else "5m" for number, at in enumerate(marked)}
    return Request(
        draw(st.sampled_from("ab")),
        blocks,
        tuple(names.get(at) for at in range(len(blocks))),
        draw(st.integers(0, len(blocks))),
        draw(st.sampled_from(["", "any", "tool f", "tool g"])),
        draw(st.sampled_from([0.0, 1.0, 6.0, 70.0])),
    )


class Named:
    """The code under test: prefixes by their names."""

    def __init__(self, block_size: int, lookback: int, min_tokens: int) -> None:
        self.block_size, self.lookback, self.min_tokens = block_size, lookback, min_tokens
        self.entries: dict[bytes, tuple[float, float]] = {}  # name -> TTL and end of life

    def usage(self, request: Request, now: float) -> Usage:
        counted = breakpoints(request.ends, request.ttls, self.min_tokens)
        root = hashing.chain_root(hashing.tenant_salt(b"secret", request.tenant), "model")
        made = plan(
            request.tokens,
            request.ends,
            counted,
            root,
            block_size=self.block_size,
            lookback=self.lookback,
            other_from=request.head_end if request.choice else None,
            other=request.choice,
        )
        assert list(made.hashes) == hashing.block_hashes(request.tokens, self.block_size, root) or request.choice
        alive = [read for read in made.reads if self.entries.get(read.key, (0, now))[1] > now]
        hit = alive[0] if alive else None
        if hit:
            ttl, _ = self.entries[hit.key]
            self.entries[hit.key] = (ttl, now + ttl)
        for mark in made.marks:
            before, end = self.entries.get(mark.key, (0.0, now))
            ttl = max(TTLS[mark.ttl], before if end > now else 0.0)
            self.entries[mark.key] = (ttl, now + ttl)
        return bill(len(request.tokens), counted, hit.position if hit else 0, TTLS)


class Spelled:
    """The contract word for word: an entry is a tenant's sequence of tokens, and the tool choice behind the head."""

    def __init__(self, lookback: int, min_tokens: int) -> None:
        self.lookback, self.min_tokens = lookback, min_tokens
        self.entries: dict[tuple[object, ...], tuple[float, float]] = {}

    def entry(self, request: Request, at: int) -> tuple[object, ...]:
        # What comes after an empty head is behind it; where the choice begins to count is part of the prefix.
        choice = (request.head_end, request.choice) if request.choice and at > request.head_end else None
        return (request.tenant, request.tokens[:at], choice)

    def usage(self, request: Request, now: float) -> Usage:
        marks = [
            (end, ttl)
            for end, ttl in zip(request.ends, request.ttls, strict=True)
            if ttl and end >= max(1, self.min_tokens)
        ]
        places = sorted(set(request.ends) - {0})
        a = 0
        for end, _ in marks:
            back = places[: places.index(end) + 1][-self.lookback :]
            for at in back:
                if self.entries.get(self.entry(request, at), (0, now))[1] > now:
                    a = max(a, at)
        b = max([end for end, ttl in marks if ttl == "1h" and end > a], default=a)
        c = max([a, *(end for end, _ in marks)])
        if a:
            key = self.entry(request, a)
            self.entries[key] = (self.entries[key][0], now + self.entries[key][0])
        for end, ttl in marks:
            key = self.entry(request, end)
            before, until = self.entries.get(key, (0.0, now))
            life = max(TTLS[ttl], before if until > now else 0.0)
            self.entries[key] = (life, now + life)
        return Usage(len(request.tokens) - c, a, {"1h": b - a, "5m": c - b})


@given(st.lists(requests(), max_size=12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 4))
def test_names_bill_as_tokens_do(sequence, block_size, lookback, min_tokens):
    named, spelled, now = Named(block_size, lookback, min_tokens), Spelled(lookback, min_tokens), 0.0
    written: dict[str, int] = {}
    for request in sequence:
        now += request.after
        usage = named.usage(request, now)
        assert usage == spelled.usage(request, now)
        assert usage.prompt == len(request.tokens)
        assert min(usage.input, usage.read, *usage.written.values()) >= 0
        assert usage.read <= written.get(request.tenant, 0)
        written[request.tenant] = max(written.get(request.tenant, 0), usage.read + usage.total_written)


@given(requests())
def test_billed_positions_follow_each_other(request_):
    """A prompt is read, written for an hour, written for 5 minutes, then input: each token once, in this order."""
    marks = breakpoints(request_.ends, request_.ttls, 0)
    for hit in {0, *(mark.position for mark in marks)}:
        usage = bill(len(request_.tokens), marks, hit, TTLS)
        kinds = [
            kind
            for kind, count in (("read", usage.read), *usage.written.items(), ("input", usage.input))
            for _ in range(count)
        ]
        assert len(kinds) == len(request_.tokens)
        for mark in marks:
            assert kinds[mark.position - 1] != "input"
            if mark.position > hit and mark.ttl == "1h":
                assert kinds[mark.position - 1] == "1h"


def test_another_tool_choice_changes_names_behind_the_head_only():
    tokens, ends, marks = tuple(range(10)), [3, 6, 9], [Breakpoint(3, "5m"), Breakpoint(6, "5m"), Breakpoint(9, "5m")]
    plans = [
        plan(tokens, ends, marks, b"root", block_size=4, lookback=20, other_from=at, other=choice)
        for at, choice in ((None, "auto"), (3, "any"), (3, "tool f"))
    ]
    for usual, other in itertools.combinations(plans, 2):
        assert usual.marks[0] == other.marks[0]
        assert all(a.key != b.key for a, b in zip(usual.marks[1:], other.marks[1:], strict=True))
        assert all(a != b for a, b in zip(usual.hashes, other.hashes, strict=True))  # the first block holds both

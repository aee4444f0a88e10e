"""Prefixes of prompts of which a log has token counts alone, derived from conversations and reported cache reads.

Assumed: a request of a conversation begins with the whole prompt of the request before it, unless its prompt is
shorter; then it shares what it reports as read. The first request of a conversation shares what it reports as read with
the latest prompt of that model that had a breakpoint there, or else was as long; the first ones that report nothing
begin as those that did. What no request reported and no conversation tells is not shared.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from warmkv.prefixes.breakpoints import LOOKBACK, CachePlan
from warmkv.prefixes.record import Candidate, Mark
from warmkv.prefixes.reported_usage import DEFAULT_TTL
from warmkv.prefixes.usage import Usage

_KEY = struct.Struct("<II")


class _Prompt:
    """The prompt of a conversation, which grows. A prefix is known by the branch on which it ends and its length."""

    __slots__ = ("branches", "keys", "length", "marks", "starts", "ttls")

    def __init__(self, branch: int) -> None:
        self.length = 0  # tokens
        self.keys: list[bytes] = []  # of full blocks
        self.starts, self.branches = [0], [branch]  # branch i has the prefixes longer than starts[i]
        self.marks: list[int] = []  # positions of breakpoints, ascending
        self.ttls: dict[int, str] = {}  # of those

    def key(self, position: int) -> bytes:
        return _KEY.pack(self.branches[bisect_left(self.starts, position) - 1], position)

    def grow(self, tokens: int, block_size: int) -> None:
        self.length = tokens
        for end in range((len(self.keys) + 1) * block_size, tokens + 1, block_size):
            self.keys.append(self.key(end))

    def mark(self, position: int, ttl: str) -> None:
        if position not in self.ttls:
            insort(self.marks, position)
        self.ttls[position] = ttl

    def fork(self, position: int, branch: int, block_size: int) -> _Prompt:
        """Return a prompt that begins with this one's first tokens."""
        found = _Prompt(branch)
        kept = bisect_left(self.starts, position) if position else 0
        found.starts, found.branches = [*self.starts[:kept], position], [*self.branches[:kept], branch]
        found.keys, found.length = self.keys[: position // block_size], position
        found.marks = self.marks[: bisect_right(self.marks, position)]
        found.ttls = {at: self.ttls[at] for at in found.marks}
        return found


class _Model:
    """What is known of the prompts of a model."""

    __slots__ = ("conversations", "ending", "latest", "lengths", "root")

    def __init__(self) -> None:
        self.conversations: dict[str, _Prompt] = {}
        self.ending: dict[int, _Prompt] = {}  # position of a breakpoint -> the latest prompt that has one there
        self.latest: list[_Prompt] = []  # each shorter than those before it, and later
        self.lengths: list[int] = []  # theirs, negated
        self.root: _Prompt | None = None  # the beginning that conversations shared last


class Conversations:
    """Names the prefixes of requests, which come in the order of their arrival."""

    def __init__(self, block_size: int) -> None:
        self._block_size, self._branches = block_size, 0
        self._models: dict[str, _Model] = {}

    def plan(self, model: str, session: str, usage: Usage, *, marked: bool) -> CachePlan:
        """Name the prefixes of a prompt; `session` may be empty. With `marked`, what was cached ends at breakpoints."""
        known = self._models.setdefault(model, _Model())
        prompt = self._prompt(known, session, usage)
        prompt.grow(usage.prompt, self._block_size)
        if session:
            known.conversations[session] = prompt
        marks: tuple[Mark, ...] = ()
        reads: tuple[Candidate, ...] = ()
        if marked and (positions := _breakpoints(usage)):
            before = prompt.marks[: bisect_right(prompt.marks, positions[-1][0])]
            for position, ttl in positions:
                ttl = ttl or prompt.ttls.get(position, DEFAULT_TTL)
                prompt.mark(position, ttl)
                known.ending[position] = prompt
                marks += (Mark(position, ttl, prompt.key(position)),)
            places = sorted({*before[-LOOKBACK:], *(at for at, _ in positions)} | ({usage.read} - {0}), reverse=True)
            reads = tuple([Candidate(at, prompt.key(at)) for at in places])
        self._remember(known, prompt)
        return CachePlan(tuple(prompt.keys), marks, reads)

    def _prompt(self, known: _Model, session: str, usage: Usage) -> _Prompt:
        total, read = usage.prompt, usage.read
        before = known.conversations.get(session) if session else None
        if before is not None:
            return before if total >= before.length else self._fork(before, min(read, total))
        if read:
            donor = known.ending.get(read)
            if donor is None or donor.length < read:
                at = bisect_right(known.lengths, -read)
                donor = known.latest[at - 1] if at else None
            if donor is not None:
                if session:
                    known.root = self._fork(donor, read)
                return self._fork(donor, read)
        elif session and known.root is not None:
            return self._fork(known.root, min(total, known.root.length))
        return self._fork(_Prompt(0), 0)

    def _fork(self, prompt: _Prompt, position: int) -> _Prompt:
        self._branches += 1
        return prompt.fork(position, self._branches, self._block_size)

    def _remember(self, known: _Model, prompt: _Prompt) -> None:
        while known.lengths and -known.lengths[-1] <= prompt.length:
            known.latest.pop()
            known.lengths.pop()
        known.latest.append(prompt)
        known.lengths.append(-prompt.length)


def _breakpoints(usage: Usage) -> Sequence[tuple[int, str | None]]:
    """Return where breakpoints must have been, and the TTL of what was written there; None where all was read."""
    found: list[tuple[int, str | None]] = []
    position = usage.read
    for ttl in sorted(usage.written, key=lambda ttl: ttl != "1h"):  # longer ones come first
        if usage.written[ttl]:
            position += usage.written[ttl]
            found.append((position, ttl))
    return found or ([(usage.read, None)] if usage.read else [])

"""Sequences that decode together, in numbers that advance by many steps without touching the sequences."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from warmkv.simulator.steps.costs import Cost, Line, StepCost

Request = TypeVar("Request")
Chunk = tuple[Sequence[StepCost], int, int]
"""Of a prompt in a step: its roofline terms, the tokens that are computed and the context up to their end."""
UNBOUNDED = sys.maxsize


@dataclass(slots=True, eq=False)
class Load:
    """Sequences that decode at one cost."""

    roofline_terms: Sequence[StepCost]  # of that cost
    batch: int = 0
    context: int = 0  # entries they hold
    growing: int = 0  # how many take one more entry per step


class DecodeBatch(Generic[Request]):
    """The sequences of one engine that decode, all in one step, to which each kind adds its cost (`batch_seconds`)."""

    def __init__(self) -> None:
        self.size = 0
        self.steps = 0  # taken so far
        self._loads: list[Load] = []  # those that have sequences now
        self._known: list[Load] = []  # and all there were
        self._order = 0
        self._ends: list[tuple[int, int, Request, Load, int, bool]] = []
        """Heap: step after which it ends, order, request, its load, entries that it holds then, grows until then."""
        self._fulls: list[tuple[int, int, Load]] = []  # heap: step after which a slot grows no more, order, its load

    def __iter__(self) -> Iterator[Request]:
        return iter([end[2] for end in self._ends])

    def load_of(self, cost: Cost) -> Load:
        """Return the load of all sequences that decode at a cost."""
        for load in self._known:
            if load.roofline_terms == cost.roofline_terms:
                return load
        self._known.append(Load(cost.roofline_terms))
        return self._known[-1]

    def join(self, request: Request, load: Load, kept: int, capacity: int, steps: int) -> None:
        """Let a sequence decode for some steps, at least one, from `kept` entries on up to `capacity`."""
        if not load.batch:
            self._loads.append(load)
        grown = min(capacity - kept, steps)  # entries that its slot takes yet: it may end before that is full
        self.size += 1
        load.batch += 1
        load.context += kept
        self._order += 1
        heapq.heappush(self._ends, (self.steps + steps, self._order, request, load, kept + grown, grown == steps))
        if grown > 0:
            load.growing += 1
            if grown < steps:
                heapq.heappush(self._fulls, (self.steps + grown, self._order, load))

    def remove(self, request: Request) -> int:
        """Take out a sequence that grows with every step; return the steps that it had left."""
        at = next(at for at, end in enumerate(self._ends) if end[2] is request)
        end, _, _, load, entries, growing = self._ends.pop(at)
        heapq.heapify(self._ends)
        self._leave(load, entries - (end - self.steps), growing)
        return end - self.steps

    def unchanged(self, most: int = UNBOUNDED) -> int:
        """Return the number of next steps, up to `most`, before whose last no sequence ends and no slot fills up."""
        if self._ends and (end := self._ends[0][0] - self.steps) < most:
            most = end
        if self._fulls and (full := self._fulls[0][0] - self.steps) < most:
            most = full
        return most

    def lines(self, chunks: Sequence[Chunk] = ()) -> list[Line]:
        """Return the seconds of the next step under each roof, and what every further one takes more.

        Steps decode a token of every sequence, and compute chunks of prompts in the same pass: each further step the
        next ones, of as many tokens.
        """
        loads = self._loads
        if (
            len(loads) == 1 and len(loads[0].roofline_terms) == 1 and not chunks
        ):  # as below, in fewer steps, for what there mostly is
            (load,) = loads
            (cost,) = load.roofline_terms
            entry = cost.c + cost.d * load.batch
            first = cost.a + (cost.b * load.batch + entry * (load.context + load.growing))
            return [(first, entry * load.growing)]
        lines: list[Line] = []
        for roof, _ in enumerate(loads[0].roofline_terms if loads else chunks[0][0]):
            empty = added = growth = 0.0
            for costs, tokens, context in chunks:
                cost = costs[roof]
                empty = max(empty, cost.a)
                added += cost.load(tokens, context)
                growth += (cost.c + cost.d * tokens) * tokens
            for load in loads:  # `batch_seconds`, which this is, would take generators for every run
                cost, batch = load.roofline_terms[roof], load.batch
                entry = cost.c + cost.d * batch  # seconds for each entry of a slot
                if cost.a > empty:
                    empty = cost.a
                added += cost.b * batch + entry * (load.context + load.growing)
                growth += entry * load.growing
            lines.append((empty + added, growth))
        return lines

    def seconds(self, chunks: Sequence[Chunk], ahead: int = 0) -> float:
        """Return the seconds of the step behind `ahead` others that changed nothing else, with chunks as in `lines`."""
        seconds, loads = 0.0, self._loads
        for roof in range(len(loads[0].roofline_terms if loads else chunks[0][0])):
            empty = added = 0.0
            for costs, tokens, context in chunks:
                cost = costs[roof]
                if cost.a > empty:
                    empty = cost.a
                added += cost.load(tokens, context)
            for load in loads:
                cost, batch = load.roofline_terms[roof], load.batch
                if cost.a > empty:
                    empty = cost.a
                added += cost.b * batch + (cost.c + cost.d * batch) * (load.context + load.growing * (ahead + 1))
            if empty + added > seconds:
                seconds = empty + added
        return seconds

    def advance(self, steps: int) -> Collection[Request]:
        """Take steps during which the batch is `unchanged`; return the sequences that end with them."""
        if not self.size:
            return ()
        self.steps += steps
        for load in self._loads:
            load.context += load.growing * steps
        while self._fulls and self._fulls[0][0] == self.steps:
            heapq.heappop(self._fulls)[2].growing -= 1
        if self._ends[0][0] > self.steps:
            return ()
        ended = []
        while self._ends and self._ends[0][0] == self.steps:
            _, _, request, load, entries, growing = heapq.heappop(self._ends)
            self._leave(load, entries, growing)
            ended.append(request)
        return ended

    def _leave(self, load: Load, entries: int, growing: bool) -> None:
        self.size -= 1
        load.batch -= 1
        load.context -= entries
        load.growing -= growing
        if not load.batch:
            self._loads.remove(load)

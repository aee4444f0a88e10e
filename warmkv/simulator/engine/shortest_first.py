"""A token budget with the shortest prompts first, as warmkv's engine forms its batches (`policies/batching.py`).

A step is one pass: a token of every sequence that decodes, and chunks of prompts in the rest of its tokens. Requests
are admitted when they get tokens, and their slot and workspace fit; who must wait lets others pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

from warmkv.policies import batching
from warmkv.policies.fair_queue import FairQueue
from warmkv.simulator.engine.batch import UNBOUNDED, Load
from warmkv.simulator.engine.formation import BatchFormation, EngineRequest, Owner
from warmkv.simulator.steps.costs import FREE, PhaseCosts, steps_until

MOST_AHEAD = 64
"""Steps of different sizes that are computed at once, at most: arrivals may be before their end."""


class WaitingSlot(EngineRequest, Protocol):
    """A request that decodes in a slot. The owner sets what follows `passed` up to `lead` when it begins."""

    passed: int  # how often another was admitted before it
    costs: PhaseCosts
    load: Load | None
    keys_per_token: float  # as `batching.work_per_token` takes it
    lead: float  # seconds by which its first step is longer, for what is copied from host memory
    kept: int  # entries of its slot at the hand-off
    capacity: int  # entries it may grow to; 0 if it draws at most one token
    slot_bytes: int
    workspace_bytes: int


Request = TypeVar("Request", bound=WaitingSlot)
Told = TypeVar("Told", bound=WaitingSlot, contravariant=True)


class StoringOwner(Owner[Told], Protocol[Told]):
    """Keep the prefix cache that requests look into before they are admitted."""

    @property
    def stores(self) -> bool:
        """Return True if prompts are stored at all."""
        ...

    def stored_tokens(self, request: Told, now: float) -> int:
        """Return the tokens of the leading blocks of a prompt that are stored."""
        ...

    def waits_for_prefix(self, request: Told, computing: Iterable[Told], now: float, *, ever: bool = False) -> bool:
        """Return True if a prompt waits for one of those that are computed (`batching.waits_for`).

        With `ever`, also if it only will once that one lacks less.
        """
        ...


class ShortestFirst(BatchFormation[Request]):
    """`step_tokens` in a step; at most `max_slots` requests at a time, in `room` bytes of slots and workspaces."""

    def __init__(
        self,
        owner: StoringOwner[Request],
        waiting: FairQueue[Request],
        wake: Callable[[float], object],
        fast_forward: bool,
        *,
        step_tokens: int,
        max_slots: int,
        room: int,
    ) -> None:
        self._store, self._waiting = owner, waiting
        self._step_tokens, self._max_slots, self._room = step_tokens, max_slots, room
        self._prompts: dict[Request, float] = {}  # in the order of admission, each with the time when it can go on
        self._used = 0  # bytes of slots and workspaces
        self._reading = 0.0  # until when files of some prompt are read
        self._attends = False  # whether tokens of any prompt so far could count for more behind a long context
        super().__init__(owner, wake, fast_forward)

    @property
    def running(self) -> list[Request]:
        return [*self.batch, *self._prompts]

    def ever_fits(self, request: Request) -> bool:
        return request.slot_bytes + request.workspace_bytes <= self._room

    def _joins(self, request: Request) -> bool:
        return self._max_slots > self.batch.size + len(self._prompts) and self._has_room(request)

    def _has_room(self, request: Request) -> bool:
        return self._used + request.slot_bytes + request.workspace_bytes <= self._room

    def _steps(self) -> Generator[None, float, None]:
        batch, prompts, waiting, fast = self.batch, self._prompts, self._waiting, self._fast_forward
        now = yield
        while True:
            blocked = False
            if waiting and self._max_slots > batch.size + len(prompts):
                blocked = self._admit(now)
            if not prompts:
                if batch.size:
                    self._run(now, batch.unchanged() if fast else 1, batch.lines())
                else:
                    self._idle = True
                now = yield
                steps, self._run_steps = self._run_steps, 0
                for request in batch.advance(steps):
                    self._end(request, now)
                continue
            ready = self._ready(now)
            if not ready and not batch.size:  # their files are being read
                self._wake(min(prompts.values()))
                now = yield
                continue
            shares = batching.split(max(1, self._step_tokens - batch.size), *self._lacking(ready))
            chunks: list[tuple[Request, int]] = []
            ending: list[Request] = []
            lead = after = 0.0
            for request, tokens in zip(ready, shares, strict=True):
                if not tokens:
                    continue
                chunks.append((request, tokens))
                if request.lead:
                    lead += request.lead
                    request.lead = 0.0
                if request.computed + tokens == request.prompt:
                    ending.append(request)
                    after += _hand_off_seconds(request)
            if fast and not blocked and not ending and self._reading <= now and self._is_deep(chunks):
                computed = self._run_shrinking(ready, shares, now + lead)
                now = yield
                steps, self._run_steps = self._run_steps, 0
                for request, tokens in zip(ready, computed[steps - 1], strict=True):
                    request.computed = tokens
                for request in batch.advance(steps):
                    self._end(request, now)
                continue
            steps = 1 if ending or blocked or not fast else self._unchanged(chunks, now)
            parts = [
                (request.costs.prefill.roofline_terms, tokens, request.computed + tokens) for request, tokens in chunks
            ]
            if steps == 1:
                self._run_to((now + lead + batch.seconds(parts) + after,))
            else:
                self._run(now + lead, steps, batch.lines(parts))
            now = yield
            steps, self._run_steps = self._run_steps, 0
            for request, tokens in chunks:
                request.computed += steps * tokens
            for request in batch.advance(steps):
                self._end(request, now)
            for request in ending:
                self._hand_off(request, now)

    def _ready(self, now: float) -> list[Request]:
        """Return the prompts whose files are read."""
        if self._reading <= now:
            return list(self._prompts)
        return [request for request, at in self._prompts.items() if at <= now]

    def _lacking(self, prompts: Sequence[Request]) -> tuple[list[int], Sequence[float]]:
        """Return the tokens that prompts lack, and what each counts for in the next step, if not all count once."""
        lacking = [request.prompt - request.computed for request in prompts]
        decoding = self.batch.size
        if not self._attends or not decoding:
            return lacking, ()
        work = [batching.work_per_token(request.computed, request.keys_per_token, decoding) for request in prompts]
        return lacking, work if max(work, default=1.0) > 1 else ()

    def _is_deep(self, chunks: Sequence[tuple[Request, int]]) -> bool:
        """Return True if tokens of these prompts come to count for more, so that each step has fewer than the last."""
        if not chunks or not self._attends or not self.batch.size:
            return False
        size = self.batch.size
        return max([batching.work_per_token(each.prompt, each.keys_per_token, size) for each, _ in chunks]) > 1

    def _run_shrinking(self, ready: Sequence[Request], shares: Sequence[int], now: float) -> list[list[int]]:
        """Begin a run of steps that divide their tokens anew, up to the next with which a prompt or a sequence ends.

        Returns the tokens that each prompt has after each step. Nobody can be admitted meanwhile but who arrives: the
        length below which a prompt gets tokens never rises while no prompt ends, for it is what the shortest lacks, or
        0 once the first one's share is a token that counts for as much as the budget.
        """
        batch, size, budget = self.batch, self.batch.size, max(1, self._step_tokens - self.batch.size)
        have = [request.computed for request in ready]
        terms = [request.costs.prefill.roofline_terms for request in ready]
        prompts, keys = [request.prompt for request in ready], [request.keys_per_token for request in ready]
        deep = [batching.work_per_token(prompt, key, size) > 1 for prompt, key in zip(prompts, keys, strict=True)]
        computed: list[list[int]] = []
        ends: list[float] = []
        most = batch.unchanged(MOST_AHEAD)
        alike = True  # whether the next step is of the same kind
        while alike:
            have = [tokens + more for tokens, more in zip(have, shares, strict=True)]
            parts = [each for each in zip(terms, shares, have, strict=True) if each[1]]
            now += batch.seconds(parts, len(ends))
            ends.append(now)
            computed.append(have)
            if len(ends) == most:
                break
            lacking = [prompt - tokens for prompt, tokens in zip(prompts, have, strict=True)]
            work = [batching.work_per_token(tokens, key, size) for tokens, key in zip(have, keys, strict=True)]
            shares = batching.split(budget, lacking, work if max(work) > 1 else ())
            alike = False
            for at, more in enumerate(shares):
                if more and (more == lacking[at] or ready[at].lead):
                    alike = False
                    break
                alike = alike or (more > 0 and deep[at])
        self._run_to(ends)
        return computed

    def _unchanged(self, chunks: Sequence[tuple[Request, int]], now: float) -> int:
        """Return the number of next steps that are like the first: no prompt and no sequence ends, nobody can join.

        Where no prompt ends, one that gets the rest of a step stays the shortest; tokens of all count once.
        """
        most = UNBOUNDED
        if chunks:
            if self._reading > now:
                return 1
            most = max(1, min([(request.prompt - request.computed - 1) // tokens for request, tokens in chunks]))
        steps = self.batch.unchanged(most)
        if not chunks:
            steps = steps_until(self.batch.lines(), now, min(self._prompts.values()), steps)
        return steps

    def _admit(self, now: float) -> bool:
        """Admit whoever gets tokens of the next step; there are free slots.

        Returns True if one that was passed often enough keeps others waiting until it waits for a prompt in progress
        itself, which may be from any step on.
        """
        waiting, prompts = self._waiting, self._prompts
        while waiting and self._max_slots > self.batch.size + len(prompts):
            below = math.inf
            if prompts:
                budget = max(1, self._step_tokens - self.batch.size)
                below = batching.admits_below(budget, *self._lacking(self._ready(now)))
            fits, waits = partial(self._fits, below, now), partial(self._waits_for_prefix, now)
            request = batching.next_prompt(waiting, fits, waits)
            if request is None:
                return any(
                    each.passed >= batching.PASSES and self._waits_for_prefix(now, each, ever=True) and not waits(each)
                    for each in islice(waiting, batching.PASSES)
                )
            waiting.take(request)
            self._used += request.slot_bytes + request.workspace_bytes
            prompts[request] = at = now + self._owner.begin(request, now)
            if at > self._reading:
                self._reading = at
            self._attends = self._attends or request.keys_per_token < math.inf
        return False

    def _waits_for_prefix(self, now: float, request: Request, *, ever: bool = False) -> bool:
        """Return True if a request waits for a prompt in progress; with `ever`, also if it will in a later step."""
        if not self._prompts or not self._store.stores or not self._has_room(request):
            return False
        return self._store.waits_for_prefix(request, self._prompts, now, ever=ever)

    def _fits(self, below: float, now: float, request: Request) -> bool:
        """Return True if a request has room, and tokens of the next step: of a prompt `below` which lengths get any."""
        if not self._has_room(request):
            return False
        return request.prompt < below or max(1, request.prompt - self._store.stored_tokens(request, now)) < below

    def _hand_off(self, request: Request, now: float) -> None:
        """Go from prefill to decode: free the workspace, give the first token."""
        self._used -= request.workspace_bytes
        del self._prompts[request]
        self._owner.prompt_computed(request, now)
        if request.output > 1:
            assert request.load is not None
            self.batch.join(request, request.load, request.kept, request.capacity, request.output - 1)
        else:
            self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        self._used -= request.slot_bytes
        self._owner.end(request, now)


def _hand_off_seconds(request: WaitingSlot) -> float:
    if not request.capacity or request.costs.hand_off is FREE:
        return 0.0
    return request.costs.hand_off.seconds(request.kept, request.prompt)

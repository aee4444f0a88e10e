"""A token budget with the shortest prompts first, as warmkv's engine forms its batches (`policies/batching.py`).

A step is one pass: a token of every sequence that decodes, and chunks of prompts in the rest of its tokens. Requests
are admitted when they get tokens, and their slot and workspace fit; who must wait lets others pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from warmkv.policies import batching
from warmkv.policies.fair_queue import FairQueue
from warmkv.simulator.engine.batch import UNBOUNDED, Chunk, Load
from warmkv.simulator.engine.formation import BatchFormation, EngineRequest, Owner
from warmkv.simulator.steps.costs import FREE, PhaseCosts, steps_until


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

    @property
    def hashes(self) -> Sequence[bytes]: ...


Request = TypeVar("Request", bound=WaitingSlot)
Told = TypeVar("Told", bound=WaitingSlot, contravariant=True)


class StoringOwner(Owner[Told], Protocol[Told]):
    """Keep the prefix cache that requests look into before they are admitted."""

    @property
    def stores(self) -> bool:
        """Return True if prompts are stored at all."""
        ...

    def resident(self, request: Told, now: float) -> tuple[int, int]:
        """Return the leading blocks of a prompt that are stored, and their tokens."""
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
        super().__init__(owner, wake, fast_forward)

    @property
    def running(self) -> list[Request]:
        return [*self.batch, *self._prompts]

    @property
    def free_slots(self) -> int:
        return self._max_slots - self.batch.size - len(self._prompts)

    def ever_fits(self, request: Request) -> bool:
        return request.slot_bytes + request.workspace_bytes <= self._room

    def _joins(self, request: Request) -> bool:
        return self.free_slots > 0 and self._has_room(request)

    def _has_room(self, request: Request) -> bool:
        return self._used + request.slot_bytes + request.workspace_bytes <= self._room

    def _steps(self) -> Generator[None, float, None]:
        batch, prompts, waiting = self.batch, self._prompts, self._waiting
        now = yield
        while True:
            if waiting:
                self._admit(now)
            ready = [request for request, at in prompts.items() if at <= now] if prompts else []
            if not ready and not batch.size:
                self._idle = not prompts
                if prompts:  # their files are being read
                    self._wake(min(prompts.values()))
                now = yield
                continue
            chunks: list[tuple[Request, int]] = []
            ending: list[Request] = []
            lead = after = 0.0
            if ready:
                shares = batching.split(self._budget, *self._lacking(ready))
                chunks = [(request, tokens) for request, tokens in zip(ready, shares, strict=True) if tokens]
            for request, tokens in chunks:
                lead += request.lead
                request.lead = 0.0
                if request.computed + tokens == request.prompt:
                    ending.append(request)
                    after += _hand_off_seconds(request)
            steps = self._unchanged(chunks, now) if self._fast_forward else 1
            lines = batch.lines([_chunk(request, tokens) for request, tokens in chunks] if chunks else ())
            self._run(now + lead, steps, lines, after)
            now = yield
            steps, self._run_steps = self._run_steps, 0
            for request, tokens in chunks:
                request.computed += steps * tokens
            for request in batch.advance(steps):
                self._end(request, now)
            for request in ending:
                self._hand_off(request, now)

    @property
    def _budget(self) -> int:
        return max(1, self._step_tokens - self.batch.size)

    def _lacking(self, prompts: Sequence[Request]) -> tuple[list[int], Sequence[float]]:
        """Return the tokens that prompts lack, and what each counts for in the next step, if not all count once."""
        lacking = [request.prompt - request.computed for request in prompts]
        if not self.batch.size:
            return lacking, ()
        work = [self._work(request, request.computed) for request in prompts]
        return lacking, work if max(work, default=1.0) > 1 else ()

    def _work(self, request: Request, context: int) -> float:
        return batching.work_per_token(context, request.keys_per_token, self.batch.size)

    def _unchanged(self, chunks: Sequence[tuple[Request, int]], now: float) -> int:
        """Return the number of next steps that are like the first: no prompt and no sequence ends, nobody can join.

        Where no prompt ends, one that gets the rest of a step stays the shortest.
        """
        most = UNBOUNDED
        if chunks:
            if max(self._prompts.values()) > now:
                return 1  # files are being read
            if max([self._work(request, request.prompt) for request, _ in chunks]) > 1:
                return 1  # the next has fewer tokens
            most = max(1, min([(request.prompt - request.computed - 1) // tokens for request, tokens in chunks]))
        steps = self.batch.unchanged(most)
        if self._prompts and not chunks:
            steps = steps_until(self.batch.lines(), now, min(self._prompts.values()), steps)
        return steps

    def _admit(self, now: float) -> None:
        """Admit whoever gets tokens of the next step."""
        while self._waiting and self.free_slots > 0:
            ready = [request for request, at in self._prompts.items() if at <= now]
            below = batching.admits_below(self._budget, *self._lacking(ready))
            fits, waits = partial(self._fits, below=below, now=now), partial(self._waits_for_prefix, now=now)
            request = batching.next_prompt(self._waiting, fits, waits)
            if request is None:
                return
            self._waiting.take(request)
            self._used += request.slot_bytes + request.workspace_bytes
            self._prompts[request] = now + self._owner.begin(request, now)

    def _waits_for_prefix(self, request: Request, now: float) -> bool:
        """Return True if a prompt in progress computes what this one lacks."""
        if not self._prompts or not self._store.stores or not self._has_room(request):
            return False
        blocks, _ = self._store.resident(request, now)
        return batching.shares_prefix(request.hashes, blocks, [other.hashes for other in self._prompts])

    def _fits(self, request: Request, below: float, now: float) -> bool:
        """Return True if a request has room, and tokens of the next step: of a prompt `below` which lengths get any."""
        if not self._has_room(request):
            return False
        return request.prompt < below or max(1, request.prompt - self._store.resident(request, now)[1]) < below

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


def _chunk(request: WaitingSlot, tokens: int) -> Chunk:
    return request.costs.prefill.roofline_terms, tokens, request.computed + tokens


def _hand_off_seconds(request: WaitingSlot) -> float:
    if not request.capacity or request.costs.hand_off is FREE:
        return 0.0
    return request.costs.hand_off.seconds(request.kept, request.prompt)

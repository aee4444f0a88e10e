"""Prefill first, in chunks, as warmkv's engine does (`replicas/engine/`).

One prompt at a time is admitted, when its slot and its workspace fit; then a chunk of it and one decode step of
everyone else take turns until it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from warmkv.simulator.engine.batch import Load
from warmkv.simulator.engine.formation import BatchFormation, EngineRequest, Owner, Waiting
from warmkv.simulator.steps.costs import FREE, PhaseCosts, run_seconds


class DecodingRequest(EngineRequest, Protocol):
    """A request that decodes in a slot. The owner sets `costs` and `load` when it begins."""

    costs: PhaseCosts
    load: Load | None
    kept: int  # entries of its slot at the hand-off
    capacity: int  # entries it may grow to; 0 if it draws at most one token
    slot_bytes: int
    workspace_bytes: int


Request = TypeVar("Request", bound=DecodingRequest)


class PrefillFirst(BatchFormation[Request]):
    """`chunk` tokens of a prompt in a step; at most `max_slots` sequences, in `room` bytes of slots and workspace."""

    def __init__(
        self,
        owner: Owner[Request],
        waiting: Waiting[Request],
        wake: Callable[[float], object],
        fast_forward: bool,
        *,
        chunk: int,
        max_slots: int,
        room: int,
    ) -> None:
        self._chunk, self._max_slots, self._room = chunk, max_slots, room
        self._prefilling: Request | None = None
        self._used = 0  # bytes of slots and workspace
        super().__init__(owner, waiting, wake, fast_forward)

    @property
    def running(self) -> list[Request]:
        return [*self.batch, *([] if self._prefilling is None else [self._prefilling])]

    @property
    def free_slots(self) -> int:
        return self._max_slots - self.batch.size - (self._prefilling is not None)

    def ever_fits(self, request: Request) -> bool:
        return request.slot_bytes + request.workspace_bytes <= self._room

    def _joins(self, request: Request) -> bool:
        return self._waiting.peek() is request and self._fits(request)

    def _fits(self, request: Request) -> bool:
        needed = self._used + request.slot_bytes + request.workspace_bytes
        return self.batch.size < self._max_slots and needed <= self._room

    def _steps(self) -> Generator[None, float, None]:
        chunk, waiting, batch, wake = self._chunk, self._waiting, self.batch, self._wake
        reading = 0.0  # seconds before the first chunk of the prompt that has been admitted
        now = yield
        while True:
            request = self._prefilling
            if request is None and waiting and self._fits(waiting.peek()):
                request = self._prefilling = waiting.pop()
                self._used += request.slot_bytes + request.workspace_bytes
                reading = self._owner.begin(request, now)
            if request is not None:
                left, lead, reading = request.prompt - request.computed, reading, 0.0
                if left > chunk:
                    whole = (left - 1) // chunk  # chunks but the last
                    count = batch.unchanged(whole) if self._fast_forward else 1
                    lead += self._chunk_seconds(request, count) + self._decode_seconds(count)
                    pauses = count < whole or batch.ends_within(count) or not self._fast_forward
                    if pauses:
                        wake(now + lead)
                        now = yield
                    request.computed += count * chunk
                    self._advance(count, now)
                    if pauses:
                        continue
                lead += self._last_chunk_seconds(request, request.prompt - request.computed)
                wake(now + lead)
                now = yield
                self._hand_off(request, now)
                if batch.size and waiting and self._fits(waiting.peek()):  # else the run has this step, too
                    wake(now + self._decode_seconds(1))
                    now = yield
                    self._advance(1, now)
            elif batch.size:
                self._run(now, batch.unchanged() if self._fast_forward else 1)
                now = yield
                steps, self._run_steps = self._run_steps, 0
                self._advance(steps, now)
            else:
                self._idle = True
                now = yield

    def _hand_off(self, request: Request, now: float) -> None:
        """Go from prefill to decode: free the workspace, give the first token."""
        self._used -= request.workspace_bytes
        self._prefilling = None
        self._owner.prompt_computed(request, now)
        if request.output > 1:
            assert request.load is not None
            self.batch.join(request, request.load, request.kept, request.capacity, request.output - 1)
        else:
            self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        self._used -= request.slot_bytes
        self._owner.end(request, now)

    def _advance(self, steps: int, now: float) -> None:
        for request in self.batch.advance(steps):
            self._end(request, now)

    # --- seconds

    def _decode_seconds(self, steps: int) -> float:
        """Seconds of the next decode steps of an unchanged batch."""
        return run_seconds(self.batch.lines(), steps) if self.batch.size else 0.0

    def _chunk_seconds(self, request: Request, count: int) -> float:
        """Seconds of the next whole chunks of a prompt; each reads all of the prompt up to its own end."""
        chunk = self._chunk
        end = request.computed + chunk
        roofs = request.costs.prefill.roofline_terms
        return run_seconds([(cost.seconds(chunk, end), (cost.c + cost.d * chunk) * chunk) for cost in roofs], count)

    def _last_chunk_seconds(self, request: Request, tokens: int) -> float:
        """Seconds of a prompt's last chunk and of its hand-off to a slot, where it has one."""
        seconds = request.costs.prefill.seconds(tokens, request.prompt)
        if request.capacity and request.costs.hand_off is not FREE:
            seconds += request.costs.hand_off.seconds(request.kept, request.prompt)
        return seconds

"""Launch a decode step before the tokens of the one before are read, so that the host prepares what the device is to do
next while it computes (cf. vLLM's asynchronous scheduling).

Tokens stay on the device and feed the next step. They are delivered a step late: what was drawn behind the end of an
answer is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from warmkv.replicas.engine.endings import Endings
from warmkv.replicas.engine.faults import NotFiniteError, is_sticky, let_go
from warmkv.replicas.engine.sampling import NO_TOKEN
from warmkv.replicas.engine.scheduler import Scheduler, Sequence
from warmkv.replicas.slots.decode_state import DecodeState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Hold a step that was launched: its sequences, and what reads their tokens."""

    sequences: list[Sequence]
    read: Callable[[], list[int]]


@dataclass(slots=True)
class Overlap:
    """Launch the steps of an engine, one of which may be in flight.

    `launch` starts a step whose input tokens come from the host, or are -1 - n for the n-th that the step in flight
    draws. It returns the tokens drawn, on the device.
    """

    scheduler: Scheduler
    endings: Endings
    max_context: int
    inv_freq: Tensor
    launch: Callable[[list[Sequence], DecodeState, list[int]], Tensor]
    launched: int = 0  # steps on top of one in flight, so far
    _in_flight: InFlight | None = None
    _begun: DecodeState | None = None

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def advance(self) -> bool:
        """Launch the next decode step, then deliver the tokens of the one before; return False if none is launched.

        None is where the host has to see a token first: for constraints, penalties, log-probabilities, resumed answers,
        and streams whose keys are turned back.
        """
        if self._begun is not None:  # it goes on first
            return False
        before = self._in_flight.sequences if self._in_flight is not None else []
        places = {sequence: at for at, sequence in enumerate(before)}
        going = [
            sequence
            for sequence in self.scheduler.decoding.values()
            if sequence.num_output_tokens + (sequence in places) < sequence.request.sampling.max_tokens
        ]
        if not going or not all(self._is_free(sequence) for sequence in going):
            return False
        slots = [sequence.slot for sequence in going if sequence.slot is not None]
        try:
            state = DecodeState(self.scheduler.pool, slots, self.inv_freq)
        except Exception as error:  # nothing has changed: memory ran out, say
            if is_sticky(error):
                raise
            return False
        for sequence in going:
            if sequence in places:
                sequence.number = None  # that of the step in flight
        sources = [-1 - places[each] if each in places else each.last_token for each in going]
        try:
            tokens = self.launch(going, state, sources)
            launched = InFlight(going, begin_read(tokens))
        except Exception as error:
            if is_sticky(error):
                raise
            log.exception("a step of %d requests failed", len(going))
            let_go(error)
            self._begun = state
            self.collect(going)
            return False
        before_it, self._in_flight = self._in_flight, launched
        self.launched += before_it is not None
        self._deliver(before_it, going)
        return True

    def _is_free(self, sequence: Sequence) -> bool:
        """Return True if a sequence may decode on while its last token is not known."""
        slot, request = sequence.slot, sequence.request
        if slot is None or slot.tokens - slot.shift >= self.max_context:
            return False
        known = len(request.resume) <= sequence.num_output_tokens
        return known and sequence.processor is None and request.sampling.logprobs is None

    def take_begun(self) -> DecodeState | None:
        """Return the step that failed when it was launched, whose rows have advanced."""
        begun, self._begun = self._begun, None
        return begun

    def collect(self, next_of: Items[Sequence] = ()) -> None:
        """Deliver the tokens of the step in flight; those of a later step wait for `next_of`."""
        before, self._in_flight = self._in_flight, None
        self._deliver(before, next_of)

    def _deliver(self, step: InFlight | None, next_of: Items[Sequence]) -> None:
        if step is None:
            return
        try:
            tokens = step.read()
        except Exception as error:
            if is_sticky(error):
                raise
            self.endings.fail([(each, let_go(error)) for each in step.sequences if self._decodes(each)], works=False)
            return
        later, failed = set(next_of), list[tuple[Sequence, Exception]]()
        if any(token != NO_TOKEN for token in tokens):
            self.endings.faults.succeeded()
        for sequence, token in zip(step.sequences, tokens, strict=True):
            if not self._decodes(sequence):  # it has ended
                continue
            if token == NO_TOKEN:
                failed.append((sequence, NotFiniteError()))
                continue
            number = sequence.number
            self.endings.deliver(sequence, token)
            if sequence in later:
                sequence.number = number
        if failed:
            self.endings.fail(failed, works=len(failed) < len(tokens))

    def _decodes(self, sequence: Sequence) -> bool:
        return sequence.slot is not None and self.scheduler.decoding.get(sequence.slot) is sequence


def begin_read(tokens: Tensor) -> Callable[[], list[int]]:
    """Begin to copy tokens to the host; return a function that waits for them."""
    if tokens.device.type != "cuda":
        return tokens.clone().tolist
    host = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        read: list[int] = host.tolist()
        return read

    return read

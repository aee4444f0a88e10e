"""A decode step of all sequences that survives the one it fails with, and running out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warmkv.replicas.engine.faults import NotFiniteError, is_sticky, let_go
from warmkv.replicas.engine.isolation import isolate
from warmkv.replicas.engine.sampling import NO_TOKEN
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slots import Slot, SlotPool

log = logging.getLogger(__name__)
Batch = Items[tuple[Slot, Sequence]]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a step: next tokens, errors that sequences fail with, and those that left for want of memory."""

    tokens: list[tuple[Sequence, int]] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    left: list[Sequence] = field(default_factory=list)


def decode(
    decoding: Mapping[Slot, Sequence],
    pool: SlotPool,
    compute: Callable[[DecodeState, list[Sequence]], list[int]],
    *,
    max_context: int,
    inv_freq: Tensor,
    leave: Callable[[Sequence, Exception], None],
    retrying: Callable[[], None],
) -> StepOutcome:
    """Draw a token for every sequence.

    If that fails, halves of the batch go on with the same step, down to the sequences that fail alone. If memory runs
    out, the youngest are ended by `leave` until it suffices. `retrying` is called before a step is repeated.
    Raises errors after which the device cannot be used any more.
    """
    step_outcome = StepOutcome()

    def end(sequence: Sequence, error: Exception) -> None:
        step_outcome.left.append(sequence)
        leave(sequence, error)

    for slot, sequence in list(decoding.items()):
        try:
            pool.rebase(slot, max_context, inv_freq)
        except Exception as error:  # some of its keys may be turned: it cannot go on here
            if is_sticky(error):
                raise
            log.exception("the keys of %s cannot be turned back", sequence.request.id)
            end(sequence, let_go(error))

    steps: dict[Slot, DecodeState] = {}  # that failed, by the slots in them

    def next_tokens(batch: Batch) -> list[int]:
        slots = [slot for slot, _ in batch]
        if steps:
            retrying()
        state = steps.get(slots[0])
        if state is None:
            state = DecodeState(pool, slots, inv_freq)
        elif state.slots != slots:
            state = state.part(slots)
        steps.update(dict.fromkeys(slots, state))
        return compute(state, [sequence for _, sequence in batch])

    def shed(batch: Batch, error: Exception) -> tuple[Slot, Sequence]:
        youngest = max(batch, key=lambda each: each[1].arrived)
        end(youngest[1], error)
        return youngest

    if decoding:
        outcome = isolate(list(decoding.items()), next_tokens, lambda: empty_cache(inv_freq.device), shed)
        step_outcome.failed.extend((sequence, error) for (_, sequence), error in outcome.failed)
        for (_, sequence), token in outcome.results:
            if token == NO_TOKEN:
                step_outcome.failed.append((sequence, NotFiniteError()))
            else:
                step_outcome.tokens.append((sequence, token))
    return step_outcome


def empty_cache(device: torch.device) -> None:
    """Give back to a device what its allocator holds in reserve."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""A pass of the model: chunks of prompts and the next token of every sequence that decodes, packed in one row.

A pass survives the request that it fails with, and running out of memory: its parts go on with the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax
from warmkv.replicas.engine.faults import NotFiniteError, is_sticky, let_go
from warmkv.replicas.engine.isolation import isolate
from warmkv.replicas.engine.sampling import NO_TOKEN
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slot import Slot
from warmkv.replicas.slots.slots import SlotPool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pass:
    """Describe one forward pass: chunks of prompts, then a token of each sequence of a decode step."""

    prompts: Items[Sequence]  # whose chunks have begun
    decoding: Items[Sequence] = ()
    state: DecodeState | None = None  # of these

    @property
    def ending(self) -> list[Sequence]:
        """Return the prompts whose last chunk this is."""
        return [sequence for sequence in self.prompts if sequence.workspace.ends]

    def ids(self) -> list[int]:
        """Return the token ids."""
        ids: list[int] = []
        for sequence in self.prompts:
            chunk = sequence.workspace.chunk
            ids += sequence.request.token_ids[chunk.start : chunk.stop]
        ids += [sequence.last_token for sequence in self.decoding]
        return ids

    def positions(self) -> list[int]:
        """Return positions of the tokens in their sequences."""
        positions = [position for sequence in self.prompts for position in sequence.workspace.chunk]
        return [*positions, *(self.state.positions if self.state else ())]

    def drawn(self) -> list[int]:
        """Return places of the tokens whose logits are wanted.

        These are the last of prompts that end and all that decode, which are sampled; then those of prompts whose
        log-probabilities are told.
        """
        places, scored, end = list[int](), list[int](), 0
        for sequence in self.prompts:
            scored += range(end, end + len(sequence.scored))
            end += len(sequence.workspace.chunk)
            if sequence.workspace.ends:
                places.append(end - 1)
        return [*places, *range(end, end + len(self.decoding)), *scored]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend q [1, q_heads, tokens, head_dim] to k and v [1, kv_heads, tokens, head_dim], each in its sequence."""
        return self._attend(layer, query, key, value, softmax, [each.workspace.attend for each in self.prompts])

    def attend_drawn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend as `attend`; returns [1, q_heads, drawn, head_dim], of the places of `drawn` alone."""
        return self._attend(layer, query, key, value, softmax, [each.workspace.attend_drawn for each in self.prompts])

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax: Softmax,
        attending: list[Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]],
    ) -> Tensor:
        out, start = [], 0
        for sequence, attend in zip(self.prompts, attending, strict=True):
            at = slice(start, start + len(sequence.workspace.chunk))
            out.append(attend(layer, query[:, :, at], key[:, :, at], value[:, :, at], softmax))
            start = at.stop
        if self.state is not None:
            q, k, v = (part[0, :, start:].transpose(0, 1)[:, :, None] for part in (query, key, value))
            out.append(self.state.attend(layer, q, k, v, softmax)[:, :, 0].transpose(0, 1)[None])
        return torch.cat(out, dim=2) if len(out) > 1 else out[0]


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """Hold the outcome of a step: tokens (NO_TOKEN of prompts that go on), failures with errors, shed requests."""

    tokens: list[tuple[Sequence, int]] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    shed: list[Sequence] = field(default_factory=list)


def run(
    prompts: Items[Sequence],
    decoding: Mapping[Slot, Sequence],
    pool: SlotPool,
    compute: Callable[[Pass], list[int]],
    *,
    max_context: int,
    inv_freq: Tensor,
    shed: Callable[[Sequence, Exception], None],
    retrying: Callable[[], None],
    begun: DecodeState | None = None,
) -> PassOutcome:
    """Compute the chunks that prompts have begun, and draw a token for every sequence that decodes, in one pass.

    If that fails, each prompt and the sequences that decode go on with the same step apart, the latter in halves, down
    to those that fail alone. If memory runs out for the sequences that decode, or for a prompt alone, `shed` ends the
    youngest until the rest fits. `retrying` is called before a part is computed again. `compute` returns a token of
    every prompt and sequence of a pass. `begun` is a decode step that failed when it was launched. Raises errors after
    which the device cannot be used any more.
    """
    outcome = PassOutcome()

    def end(sequence: Sequence, error: Exception) -> None:
        outcome.shed.append(sequence)
        shed(sequence, error)

    # Steps that were begun, by the slots in them.
    steps: dict[Slot, DecodeState] = dict.fromkeys(begun.slots, begun) if begun is not None else {}
    for slot, sequence in list(decoding.items()):
        if slot in steps:
            continue
        try:
            pool.rebase(slot, max_context, inv_freq)
        except Exception as error:  # some of its keys may be turned: it cannot go on here
            if is_sticky(error):
                raise
            log.exception("the keys of %s cannot be turned back", sequence.request.id)
            end(sequence, let_go(error))

    def decode_state(slots: list[Slot]) -> DecodeState:
        state = steps.get(slots[0])
        if state is None:
            state = DecodeState(pool, slots, inv_freq)
        elif state.slots != slots:
            state = state.subset(slots)
        steps.update(dict.fromkeys(slots, state))
        return state

    tries = 0

    def next_tokens(batch: Items[Sequence]) -> list[int]:
        nonlocal tries
        tries += 1
        if tries > 1:
            retrying()
        chunks = [sequence for sequence in batch if sequence.prefill is not None]
        others = [sequence for sequence in batch if sequence.prefill is None]
        slots = [sequence.slot for sequence in others if sequence.slot is not None]
        return compute(Pass(chunks, others, decode_state(slots) if slots else None))

    def shed_youngest(batch: Items[Sequence], error: Exception) -> Sequence:
        youngest = max(batch, key=lambda sequence: sequence.arrived)
        end(youngest, error)
        return youngest

    batch = [*prompts, *decoding.values()]
    if batch:
        isolated = isolate(batch, next_tokens, lambda: empty_cache(inv_freq.device), shed_youngest, _apart)
        outcome.failed.extend(isolated.failed)
        for sequence, token in isolated.results:
            draws = sequence.prefill is None or (sequence.prefill.is_computed and sequence.request.sampling.max_tokens)
            if token == NO_TOKEN and draws:
                outcome.failed.append((sequence, NotFiniteError()))
            else:
                outcome.tokens.append((sequence, token))
    return outcome


def _apart(batch: Items[Sequence]) -> list[list[Sequence]]:
    """Split a pass into what can be computed apart: each prompt, and the sequences that decode."""
    decoding = [sequence for sequence in batch if sequence.prefill is None]
    prompts = [[sequence] for sequence in batch if sequence.prefill is not None]
    return [decoding, *prompts] if decoding else prompts


def empty_cache(device: torch.device) -> None:
    """Give back to a device what its allocator holds in reserve."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

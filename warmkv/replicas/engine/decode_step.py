"""Run a decode step: the model and the sampler on the device, replayed as a CUDA graph where one is recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warmkv.replicas.engine.forward import Forward
from warmkv.replicas.engine.graphs import Graphs
from warmkv.replicas.engine.passes import Pass
from warmkv.replicas.engine.sampling import pick
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.engine.step_inputs import StepInputs, upload
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.step_buffer import StepBuffer

Drawn = tuple[Tensor, Tensor | None]
"""Logits [batch, vocabulary], and tokens [batch] that are drawn from them as they are, if they were drawn."""


@dataclass(slots=True)
class DecodeSteps:
    """Run decode steps of batches, which may be padded."""

    buffer: StepBuffer
    vocabulary: int
    graphs: Graphs[Drawn] | None = None
    row_by_row: bool = False  # how tokens are drawn
    drawn: Tensor | None = None  # tokens of the step before, which stay on the device for ids that name them
    _logits: Tensor | None = None  # of the step before, of recorded ones

    @property
    def held_bytes(self) -> int:
        """Return the bytes of recordings, and of the results that steps keep on the device."""
        held = sum(each.nbytes for each in (self.drawn, self._logits) if each is not None)
        return held + (self.graphs.record.taken if self.graphs is not None else 0)

    def decode(
        self, forward: Forward, state: DecodeState, inputs: StepInputs, *, processed: bool, kept: bool = False
    ) -> Drawn:
        """Return logits, and the tokens that a recorded step samples from them.

        Tokens are None where nothing is recorded, logits are to be `processed` first, or the host has to look at them.
        The next step overwrites the results, unless `kept`.
        """

        def run() -> Tensor:
            ids = inputs.ids if self.drawn is None else resolve(inputs.ids, self.drawn)
            return forward(ids, inputs.positions, state)

        graphs, key = self.graphs, None if kept else state.key
        if graphs is None or key is None:
            return run(), None
        draws, branches = inputs.draws, None
        if draws is not None:
            branches = draws.branches(self.vocabulary)
            if processed or branches.falls_short:
                draws = branches = None
                processed = True

        def compute() -> Drawn:
            logits = self._copied(run())
            return logits, pick(logits, draws, row_by_row=self.row_by_row)

        state.begin()
        logits, tokens = graphs.compute((key, branches), compute, state.restart)
        state.complete()
        return logits, None if processed else tokens

    def _copied(self, logits: Tensor) -> Tensor:
        """Copy logits to one buffer for all recordings; each would hold memory for its own otherwise."""
        if self._logits is None or len(self._logits) < len(logits):
            self._logits = torch.empty_like(logits)
        self._logits[: len(logits)] = logits
        return self._logits[: len(logits)]

    def launch(self, forward: Forward, sequences: list[Sequence], state: DecodeState, sources: list[int]) -> Tensor:
        """Start a step as `Overlap.launch`."""
        assert self.drawn is not None
        inputs = upload(self.buffer, Pass((), sequences, state), sequences, sources)
        logits, tokens = self.decode(forward, state, inputs, processed=False)
        if tokens is None:
            tokens = pick(logits, inputs.draws, row_by_row=self.row_by_row)
        self.drawn[: len(tokens)] = tokens
        return tokens[: len(sequences)]


def resolve(ids: Tensor, drawn: Tensor) -> Tensor:
    """Replace ids of -1 - n by the n-th token that the step before drew; by 0 if it drew none there."""
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_min(0)], ids).clamp_min(0)

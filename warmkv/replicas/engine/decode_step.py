"""A step of sequences that decode: the model, and the tokens drawn on the device, replayed where it is recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.replicas.engine.forward import CompiledForward, ModelRunner
from warmkv.replicas.engine.graphs import Graphs
from warmkv.replicas.engine.sampling import pick
from warmkv.replicas.engine.step_inputs import StepInputs
from warmkv.replicas.slots.decode_state import DecodeState

Drawn = tuple[Tensor, Tensor | None]
"""Logits [batch, vocabulary], and tokens [batch] that are drawn from them as they are, if they were drawn."""


def decode(
    forward: ModelRunner | CompiledForward,
    graphs: Graphs[Drawn] | None,
    state: DecodeState,
    inputs: StepInputs,
    *,
    vocabulary: int,
    processed: bool,
    drawn: Tensor | None = None,
) -> Drawn:
    """Run the model for a batch that may be padded.

    Tokens are drawn with it where it is recorded, unless logits are `processed` before or the host has to look at them.
    `drawn` are those of the step before, for ids that name these.
    """

    def run() -> Tensor:
        ids = inputs.ids if drawn is None else resolve(inputs.ids, drawn)
        return forward(ids, inputs.positions, state)

    key = state.key if graphs is not None else None
    if graphs is None or key is None:
        return run(), None
    draws, branches = inputs.draws, None
    if draws is not None:
        branches = draws.branches(vocabulary)
        if processed or branches.falls_short:
            draws = branches = None
            processed = True

    def compute() -> Drawn:
        logits = run()
        return logits, pick(logits, draws)

    state.begin()
    logits, tokens = graphs.compute((key, branches), compute, state.restart)
    return logits, None if processed else tokens


def resolve(ids: Tensor, drawn: Tensor) -> Tensor:
    """Return ids of which -1 - n is replaced by the n-th token drawn before; by 0 if that was none."""
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_min(0)], ids).clamp_min(0)

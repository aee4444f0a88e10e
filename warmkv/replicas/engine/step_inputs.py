"""Write the inputs of the model and the sampler to the step's buffer, and upload them at once."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from warmkv.replicas.engine.passes import Pass
from warmkv.replicas.engine.sampling import PARAMETERS, Draws, parameters_of
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.slots.row_tables import padded_batch
from warmkv.replicas.slots.step_buffer import StepBuffer


@dataclass(frozen=True, slots=True)
class StepInputs:
    """View the step's buffer, which the next step overwrites."""

    ids: Tensor  # [1, tokens]; of a pass without prompts [batch, 1], padded
    positions: Tensor  # as ids
    places: Tensor  # [drawn] places whose logits are wanted, of a pass with prompts
    draws: Draws | None  # of tokens that are drawn, padded like ids; None if all take the most probable token


def reserve(buffer: StepBuffer, tokens: int, slots: int) -> None:
    """Reserve room in a buffer for passes of `tokens` tokens beside one of each slot."""
    most = tokens + padded_batch(slots)
    buffer.reserve(tokens=most, positions=most, places=2 * most, parameters=len(PARAMETERS) * most)


def upload(buffer: StepBuffer, batch: Pass, drawing: Items[Sequence], sources: list[int] | None = None) -> StepInputs:
    """Write and upload the inputs of a pass; a token is drawn for each of `drawing`.

    `sources` stand for the tokens of a batch of which some are on the device only (`decode_step.resolve`).
    """
    ids, positions = batch.ids() if sources is None else sources, batch.positions()
    shape, drawn = (1, len(ids)), len(drawing)
    if not batch.prompts and batch.state is not None:
        shape, drawn = (batch.state.padded, 1), batch.state.padded
        pads = [0] * (batch.state.padded - len(ids))
        ids, positions = ids + pads, positions + pads
    places = batch.drawn() if batch.prompts else []
    for section, numbers in (("tokens", ids), ("positions", positions), ("places", places)):
        buffer.write(section)[: len(numbers)] = numbers
    host = parameters_of(drawing, drawn)
    if host is not None:
        buffer.write("parameters")[: host.size] = host.view(np.int64).ravel()
    buffer.upload()
    parameters = buffer.on_device("parameters").view(torch.float64)
    return StepInputs(
        buffer.on_device("tokens")[: len(ids)].view(shape),
        buffer.on_device("positions")[: len(ids)].view(shape),
        buffer.on_device("places")[: len(places)],
        None if host is None else Draws(host, parameters[: host.size].view(host.shape)),
    )

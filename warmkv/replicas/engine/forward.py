"""Running the model: eagerly, or for steps that only decode as compiled code that batches of every size share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from warmkv.config import EngineConfig
from warmkv.policies.compression.hook import StepState
from warmkv.policies.compression.softmax import Softmax
from warmkv.replicas.loading.last_layer import DrawnOnly
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.loading.packed_weights import packed_bytes

LEAST_LEFT_OUT = 16
"""Positions of a pass as of which the last layer leaves them out: its queries are computed twice for the others."""


class ModelRunner:
    """The model as it is, for prompts and for sequences that decode."""

    def __init__(self, model: LoadedModel) -> None:
        self._module, self._leaves_at_drawn = model.module, model.leaves_at_drawn
        # States know what is seen. Without a ready mask transformers looks for packed sequences, which a GPU waits for.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    def __call__(self, ids: Tensor, positions: Tensor, state: StepState) -> Tensor:
        """Return logits [batch, vocabulary] of the last position of ids [batch, n] at positions [batch, n].

        By a `DrawnOnly` of a single row, those of its places: [drawn, vocabulary].
        """
        if not isinstance(state, DrawnOnly):
            return self._logits(ids, positions, state, 1)[:, -1]
        few = ids.shape[1] - len(state.places) >= LEAST_LEFT_OUT
        if state.is_scored or not few or not self._leaves_at_drawn:
            return self._logits(ids, positions, state.state, state.places)[0]
        return self._logits(ids, positions, state, 0)[0]

    def _logits(self, ids: Tensor, positions: Tensor, state: StepState, keep: int | Tensor) -> Tensor:
        output = self._module(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask,
            use_cache=False,
            logits_to_keep=keep,
            warmkv=state,
        )
        logits: Tensor = output.logits
        return logits


def compiles(config: EngineConfig, device: torch.device) -> bool:
    """Return True if decode steps are compiled on a device."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


class CompiledForward:
    """Decode steps through `torch.compile`; attention stays a call from the compiled code into a step's own state.

    There are two graphs, for one sequence and for any number: requests come and go without a rebuild.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Compile the decode step.

        Raises ValueError if the model's weights are packed: a compiler cannot look into these.
        """
        if packed_bytes(model.module):
            raise ValueError("packed weights cannot be compiled: load the model with packed=False")
        self._device = model.device
        self._relay = _Relay()
        self._compiled: Any = torch.compile(ModelRunner(model), fullgraph=True)

    def __call__(self, ids: Tensor, positions: Tensor, state: StepState) -> Tensor:
        """Return logits [batch, vocabulary] of ids and positions [batch, 1]."""
        if len(ids) > 1:
            torch._dynamo.maybe_mark_dynamic(ids, 0)
            torch._dynamo.maybe_mark_dynamic(positions, 0)
        self._relay.state = state
        try:
            logits: Tensor = self._compiled(ids, positions, self._relay)
        finally:
            self._relay.state = None
        return logits

    def build(self) -> Iterator[str]:
        """Compile both graphs; yields what is compiled next."""
        for batch, what in ((1, "one sequence"), (2, "several sequences")):
            yield what
            ids = torch.zeros(batch, 1, dtype=torch.long, device=self._device)
            self(ids, torch.zeros_like(ids), _Echo())


class _Echo:
    """A state without a cache, for when only the code around attention matters."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return query.clone()


class _Relay:
    """Stands in for the state of a step in compiled code, which passes nothing but tensors and numbers: it is named."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.state: StepState | None = None
        _relays[self.number] = self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        out: Tensor = _attend(query, key, value, layer, self.number, softmax.scale, softmax.softcap, softmax.sinks)
        return out


_numbers = itertools.count()
_relays: WeakValueDictionary[int, _Relay] = WeakValueDictionary()


@torch.library.custom_op("warmkv::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    relay: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    state = _relays[relay].state
    assert state is not None
    return state.attend(layer, query, key, value, Softmax(scale, softcap, sinks)).contiguous()


@_attend.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)

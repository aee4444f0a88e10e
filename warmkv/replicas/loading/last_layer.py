"""The last decoder layer, computed for few positions of a chunk: those whose logits are drawn from.

Of the others nothing is read but their keys and values, so their queries' attention, its projection and the MLP are
left out there. In a model of six layers that is a sixth of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from warmkv.policies.compression.hook import StepState
from warmkv.policies.compression.softmax import Softmax


class ChunkState(StepState, Protocol):
    """A state of chunks of prompts, which knows of what tokens are drawn."""

    def attend_drawn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Do what `attend` does, and return its output of the drawn positions alone, [1, q_heads, drawn, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class DrawnOnly:
    """The state of a pass that is to leave a model's last layer at `places` [drawn] only."""

    state: ChunkState
    places: Tensor
    is_scored: bool = False  # its places are not those of `attend_drawn` alone: all positions are computed

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return self.state.attend(layer, query, key, value, softmax)


class _AttendedError(Exception):
    """Ends a layer behind its attention."""

    def __init__(self, out: Tensor) -> None:
        self.out = out


@dataclass(frozen=True, slots=True)
class _Attending:
    """Ends the layer once all keys and values are in place."""

    state: ChunkState

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        raise _AttendedError(self.state.attend_drawn(layer, query, key, value, softmax))


@dataclass(frozen=True, slots=True)
class _Attended:
    """Has attended already."""

    out: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return self.out


def leave_at_drawn(module: Any) -> bool:
    """Let the last decoder layer of a causal LM follow `DrawnOnly`; return False where it has no list of layers."""
    layers = getattr(module.get_decoder(), "layers", None)
    if not layers:
        return False
    layer = layers[-1]
    if "forward" not in vars(layer):
        layer.forward = _follow(layer.forward)
    return True


def _follow(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, *given: Any, **options: Any) -> Tensor:
        drawn = options.get("warmkv")
        if not isinstance(drawn, DrawnOnly):
            return whole(hidden, *given, **options)
        try:
            whole(hidden, *given, **options | {"warmkv": _Attending(drawn.state)})
        except _AttendedError as ended:
            attended = ended.out
        if not len(drawn.places):
            return hidden[:, :0]

        def chosen(value: Any) -> Any:
            """Return the drawn positions of what has one place for each."""
            if isinstance(value, tuple):
                return tuple(map(chosen, value))
            is_along = torch.is_tensor(value) and value.dim() > 1 and value.shape[1] == hidden.shape[1]
            return value.index_select(1, drawn.places) if is_along else value

        options = {name: chosen(value) for name, value in options.items()} | {"warmkv": _Attended(attended)}
        return whole(chosen(hidden), *map(chosen, given), **options)

    return forward

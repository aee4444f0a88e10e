"""Run the model as compiled code that passes of every size share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from warmkv.config import EngineConfig
from warmkv.policies.compression.hook import StepState
from warmkv.policies.compression.softmax import Softmax
from warmkv.replicas.engine.forward.eager import ModelRunner
from warmkv.replicas.engine.forward.layers import Layers
from warmkv.replicas.loading.last_layer import DrawnOnly
from warmkv.replicas.loading.load import LoadedModel

BUILT_TOKENS = 48
"""Tokens of the pass with which its graph is built, which holds for other numbers as well."""

NEXT = -1
"""The layer of a call from code that layers share."""


def compiles(config: EngineConfig, device: torch.device) -> bool:
    """Return True if passes of the model are compiled on a device."""
    return not config.batch_invariant and _wants_compiled(config, device)


def _wants_compiled(config: EngineConfig, device: torch.device) -> bool:
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


class CompiledForward:
    """Run the model through `torch.compile`; attention stays a call from the compiled code into a step's own state.

    There are three graphs, for a sequence that decodes, for any number of them, and for passes with prompts: requests
    come and go without a rebuild. Passes whose logits are wanted at more places than tokens are drawn from run eagerly.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Prepare to compile the model."""
        self.device, self._leaves_at_drawn = model.device, model.leaves_at_drawn
        self._relay = _Relay()
        self._eager = ModelRunner(model)
        self._decode, self._pass = _compiled(self._eager.__call__), _compiled(self._logits_of_pass)

    def __call__(self, ids: Tensor, positions: Tensor, state: StepState) -> Tensor:
        """Return logits [batch, vocabulary] of the last position of ids [batch, n] at positions [batch, n].

        By a `DrawnOnly` of a single row, those of its places: [drawn, vocabulary].
        """
        if isinstance(state, DrawnOnly):
            if state.is_scored or ids.shape[1] == 1:
                return self._eager(ids, positions, state)
            return self._of_pass(ids, positions, state)
        if ids.shape[1] > 1:
            return self._eager(ids, positions, state)
        if len(ids) > 1:
            torch._dynamo.maybe_mark_dynamic(ids, 0)
            torch._dynamo.maybe_mark_dynamic(positions, 0)
        with self._relay.to(state):
            logits: Tensor = self._decode(ids, positions, self._relay)
        return logits

    def _of_pass(self, ids: Tensor, positions: Tensor, drawn: DrawnOnly) -> Tensor:
        count = len(drawn.places)  # a graph for none or one would be another
        places = F.pad(drawn.places, (0, max(0, 2 - count)))
        for tensor, dimension in ((ids, 1), (positions, 1), (places, 0)):
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        with self._relay.to(drawn.state):
            logits: Tensor = self._pass(ids, positions, places, self._relay)
        return logits[:count]

    def _logits_of_pass(self, ids: Tensor, positions: Tensor, places: Tensor, relay: _Relay) -> Tensor:
        if self._leaves_at_drawn:
            return self._eager.logits(ids, positions, DrawnOnly(_DrawnRelay(relay, places), places), 0)[0]
        return self._eager.logits(ids, positions, relay, places)[0]

    def build(self) -> Iterator[str]:
        """Compile all graphs; yields what is compiled next."""
        return _build(self)


def _compiled(function: Any) -> Any:
    """Compile a function or a method for one engine, whose model stays as it is.

    What was compiled is looked up by code and guards. Those on the model are left out, so each engine has its own code.
    """
    shared = function.__func__ if isinstance(function, MethodType) else function
    own: Any = FunctionType(
        shared.__code__.replace(), shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__
    )
    own.__kwdefaults__ = shared.__kwdefaults__
    if isinstance(function, MethodType):
        own = MethodType(own, function.__self__)
    return torch.compile(own, fullgraph=True, options={"guard_filter_fn": _of_shapes})


def _of_shapes(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on inputs. A thousand on the model, which stays as it is, took 0.4 ms of every pass."""
    asked = ("TENSOR_MATCH", "SHAPE_ENV", "GLOBAL_STATE")
    return [guard.guard_type in asked and "_parameters" not in guard.name for guard in guards]


class LayeredForward:
    """Run the model with its layers compiled one by one, as `CompiledForward` does with all of it as one graph."""

    def __init__(self, model: LoadedModel) -> None:
        """Prepare to compile the layers of the model, which must be in a list (`leaves_at_drawn`)."""
        self.device = model.device
        self._eager, self._layers = ModelRunner(model), Layers(_compiled)
        self._layers.add(model.module)
        self._relay = _LayerRelay(self._layers)

    def __call__(self, ids: Tensor, positions: Tensor, state: StepState) -> Tensor:
        """Return logits as `CompiledForward`."""
        if not self._relay.order:
            self._relay.order = self._order()
        drawn = state if isinstance(state, DrawnOnly) else None
        if drawn is None and ids.shape[1] == 1:
            with self._relay.to(state):
                return self._eager(ids, positions, self._relay)
        if drawn is None or drawn.is_scored or ids.shape[1] == 1:
            return self._eager(ids, positions, state)
        count = len(drawn.places)  # a graph for none or one would be another
        places = F.pad(drawn.places, (0, max(0, 2 - count)))
        with self._relay.to(drawn.state):
            state = _LayersDrawn(_DrawnRelay(self._relay, places), places, compiled_layers=self._layers)
            return self._eager.logits(ids, positions, state, 0)[0, :count]

    def _order(self) -> tuple[int, ...]:
        """Return the numbers of layers as they attend."""
        ids, echo = torch.zeros(1, 1, dtype=torch.long, device=self.device), _Echo()
        self._eager(ids, torch.zeros_like(ids), echo)
        return tuple(echo.attended)

    def build(self) -> Iterator[str]:
        """Compile the layers for all passes; yields what is compiled next."""
        self._layers.dynamic = True
        try:
            yield from _build(self)
        finally:
            self._layers.dynamic = False


def _build(forward: CompiledForward | LayeredForward) -> Iterator[str]:
    for batch, what in ((1, "decoding of one sequence"), (2, "decoding of several sequences")):
        yield what
        ids = torch.zeros(batch, 1, dtype=torch.long, device=forward.device)
        forward(ids, torch.zeros_like(ids), _Echo())
    yield "prompts"
    ids = torch.zeros(1, BUILT_TOKENS, dtype=torch.long, device=forward.device)
    forward(ids, torch.zeros_like(ids), DrawnOnly(_Echo(), ids[0, :3]))


Compiled = CompiledForward | LayeredForward


def compiled(model: LoadedModel, device: torch.device) -> Compiled:
    """Return what is to compile a model: on a GPU its layers one by one, which starts in less time."""
    return LayeredForward(model) if device.type == "cuda" and model.leaves_at_drawn else CompiledForward(model)


class _Echo:
    """A state without a cache, for when only the code around attention matters."""

    def __init__(self) -> None:
        self.attended: list[int] = []  # layers, in their order

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.attended.append(layer)
        return query.clone()

    def attend_drawn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return query[:, :, :0]


class _Relay:
    """Stands in for the state of a step in compiled code, which passes nothing but tensors and numbers: it is named."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.state: Any = None
        self.next: Iterator[int] = iter(())  # layers that are still to attend, where calls do not name theirs
        _relays[self.number] = self

    @contextmanager
    def to(self, state: StepState) -> Iterator[None]:
        """Attend to a state for a while."""
        self.state = state
        try:
            yield
        finally:
            self.state = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return self.attend_places(layer, query, key, value, softmax, None)

    def attend_places(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, places: Tensor | None
    ) -> Tensor:
        """Attend as `attend`, or by the state's `attend_drawn` where `places` are given."""
        rest = (softmax.scale, softmax.softcap, softmax.sinks)
        out: Tensor = torch.ops.warmkv.attend(query, key, value, places, layer, self.number, *rest)
        return out.transpose(1, 2)


class _LayerRelay(_Relay):
    """Count the attention calls of a pass: code that layers share does not know which of them it computes."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.compiled_layers = layers
        self.order: tuple[int, ...] = ()  # in which layers attend

    @contextmanager
    def to(self, state: StepState) -> Iterator[None]:
        self.next = iter(self.order)
        with super().to(state):
            yield

    def attend_places(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, places: Tensor | None
    ) -> Tensor:
        return super().attend_places(NEXT, query, key, value, softmax, places)


@dataclass(frozen=True, slots=True)
class _LayersDrawn(DrawnOnly):
    """Leave the last layer at places, and have compiled layers."""

    compiled_layers: Layers | None = None


class _DrawnRelay:
    """Tell a compiler at how many places the last layer is computed; attend through a relay."""

    def __init__(self, relay: _Relay, places: Tensor) -> None:
        self._relay, self._places = relay, places

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return self._relay.attend(layer, query, key, value, softmax)

    def attend_drawn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return self._relay.attend_places(layer, query, key, value, softmax, self._places)


_numbers = itertools.count()
_relays: WeakValueDictionary[int, _Relay] = WeakValueDictionary()


torch.library.define(  # a call takes 4 us less than one of `torch.library.custom_op`
    "warmkv::attend",
    "(Tensor query, Tensor key, Tensor value, Tensor? places, int layer, int relay, float scale, float? softcap, "
    "Tensor? sinks) -> Tensor",
)


@torch.library.impl("warmkv::attend", "CompositeExplicitAutograd")
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor | None,
    layer: int,
    relay: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by the state of a relay, and return [batch, n, q_heads, head_dim], as models go on with it.

    With `places`, as many positions come back, zeros where fewer are drawn from.
    """
    through = _relays[relay]
    state, softmax = through.state, Softmax(scale, softcap, sinks)
    if layer == NEXT:
        layer = next(through.next)
    if places is None:
        out: Tensor = state.attend(layer, query, key, value, softmax)
    else:
        out = state.attend_drawn(layer, query, key, value, softmax)
        out = F.pad(out, (0, 0, 0, len(places) - out.shape[2]))
    return out.transpose(1, 2).contiguous()


@torch.library.register_fake("warmkv::attend")
def _(query: Tensor, key: Tensor, value: Tensor, places: Tensor | None, *_: object) -> Tensor:
    count = query.shape[2] if places is None else places.shape[0]
    return query.new_empty(query.shape[0], count, query.shape[1], query.shape[3])

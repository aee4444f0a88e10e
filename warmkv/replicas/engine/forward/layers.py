"""Compile a model's decoder layers one by one, of which those that are alike share what is compiled.

A model of many layers starts in a fraction of the time that it takes to compile as one graph. What a call of every
layer costs the host is nothing where steps are recorded, and little beside a chunk of a prompt on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from warmkv.replicas.loading.last_layer import DrawnOnly

SIMPLE = (bool, int, float, str, type(None))
LAYER_NUMBER = "layer_idx"
"""The attribute of modules of transformers that differs among layers that are alike."""


@dataclass(slots=True)
class Layers:
    """Hold the compiled layers of one engine; `compile` makes compiled functions of functions."""

    compile: Callable[[Any], Any]
    dynamic: bool = False  # whether sizes of what is compiled now are to hold for others, too
    _by_layer: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def add(self, module: Any) -> None:
        """Have every decoder layer of a causal LM dispatch to what is compiled of it for the engine that calls."""
        alike: dict[Hashable, Callable[..., Any]] = {}
        for layer in module.get_decoder().layers:
            if not isinstance(layer.forward, _Dispatch):
                layer.forward = _Dispatch(layer, layer.forward, "forward" in vars(layer))
            dispatch, kind = layer.forward, fingerprint(layer)
            if dispatch.is_own:  # a function that only this layer has
                self._by_layer[id(layer)] = self.compile(dispatch.whole)
                continue
            if kind not in alike:
                alike[kind] = self.compile(type(layer).forward)
            self._by_layer[id(layer)] = partial(alike[kind], layer)

    def run(self, layer: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute a layer by what is compiled of it."""
        if self.dynamic:
            _mark(given[0], [*given, *options.values()])
        return self._by_layer[id(layer)](*given, **options)


def _mark(hidden: Tensor, values: list[Any]) -> None:
    """Tell the compiler that sizes of batch and positions differ, of all that has those of `hidden` [batch, n, d]."""
    for tensor in _tensors(values):
        for dimension in (0, 1):
            size = hidden.shape[dimension]
            if tensor.dim() > 1 and size > 1 and tensor.shape[dimension] == size:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    for value in values:
        if isinstance(value, DrawnOnly):
            torch._dynamo.maybe_mark_dynamic(value.places, 0)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


@dataclass(slots=True)
class _Dispatch:
    """Run a layer as it was, or as compiled for the engine whose state comes along."""

    layer: Any
    whole: Callable[..., Any]
    is_own: bool  # the layer's, not its class's

    def __call__(self, *given: Any, **options: Any) -> Any:
        compiled = getattr(options.get("warmkv"), "compiled_layers", None)
        return self.whole(*given, **options) if compiled is None else compiled.run(self.layer, given, options)


def fingerprint(layer: nn.Module) -> Hashable:
    """Return a key that layers share if one's compiled code computes the other: all but weights and layer numbers."""
    return tuple(
        (name, type(module), tuple(_facts(module)), tuple(_shapes(module))) for name, module in layer.named_modules()
    )


def _facts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        if name in (LAYER_NUMBER, "forward") or name in _KEPT or (isinstance(value, dict) and not value):
            continue
        yield name, value if isinstance(value, SIMPLE) else id(value)


_KEPT = frozenset(vars(nn.Module())) - {"training"}
"""Attributes in which modules keep their parts, weights and hooks."""


def _shapes(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    hooks = (name for name in _KEPT if "hook" in name and vars(module).get(name))
    yield from ((name, id(module)) for name in hooks)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride()

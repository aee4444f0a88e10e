"""Weights as oneDNN lays them out: on a CPU, products with few rows read them at twice the speed of plain ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

ROWS = 8
"""Rows for which the layout is chosen. One for 8 rows is fast for 512, too; one for a single row is not for 8."""


LEAST_WEIGHTS = 1 << 16
"""Of a layer that is packed. A call of oneDNN costs some 11 us more than a plain one, which less hardly wins back."""


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference, its weight packed: its `weight` has a type and a shape, and no values."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)  # routers ask for its type
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self._number = next(_numbers)
        _layers[self._number] = self

    @property
    def nbytes(self) -> int:
        return self.in_features * self.out_features * self._packed.element_size()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            named: Tensor = torch.ops.warmkv.multiply_by(x, self._number, self.out_features)
            return named
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """Return x [..., in_features] times the weight, plus the bias: [..., out_features]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


_numbers = itertools.count()
# Compiled code passes nothing but plain tensors and numbers, so there a layer is named. An operator that is defined so
# costs 4 us a call less than one by `torch.library.custom_op`.
_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()


torch.library.define("warmkv::multiply_by", "(Tensor x, int layer, int width) -> Tensor")


@torch.library.impl("warmkv::multiply_by", "CompositeExplicitAutograd")
def _multiply_by(x: Tensor, layer: int, width: int) -> Tensor:
    return _layers[layer].multiply(x)


@torch.library.register_fake("warmkv::multiply_by")
def _(x: Tensor, layer: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if this build of torch packs weights of a type: float32 on CPUs, where oneDNN is built in."""
    operators = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    )


@torch.inference_mode()
def pack_linears(module: nn.Module, copied: Callable[[Tensor], None] = lambda weight: None) -> None:
    """Replace every large plain linear layer inside a module. A weight that an embedding shares stays there as well.

    `copied` is told of every weight that has been packed.
    """
    for name, child in module.named_children():
        if type(child) is nn.Linear and child.weight.numel() >= LEAST_WEIGHTS:
            setattr(module, name, PackedLinear(child))
            copied(child.weight)
        else:
            pack_linears(child, copied)


@torch.no_grad()
def leave_file(module: nn.Module) -> None:
    """Copy what stays plain, and so let go of the checkpoint's memory map, which holds the packed weights as well."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def packed_bytes(module: Any) -> int:
    """Return bytes of packed weights inside a module."""
    return sum(child.nbytes for child in module.modules() if isinstance(child, PackedLinear))

"""A storage format: how entries of a decode slot or of a prefix block are kept. One file each in `storages/`.

Importing a format needs neither torch nor `warmkv.policy_spec`, which takes names from here: admission, the simulator
and the block store read what a format declares. Only encoding and decoding need torch, and import it when called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from warmkv.registry import STORAGES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from warmkv.policy_spec import DecodeRule

register = STORAGES.register
SCALE_BYTES = 2
"""Bytes of a zero point, a step or a scale: float16."""


class StorageFormat(ABC):
    """A format of keys and values. Stateless: everything about a request is an argument.

    A subclass declares its name, `entry_bytes` and how keys are encoded and decoded; everything else has a default.
    Encoding gives a tuple of tensors, the parts. Every part has the shape [*lead, n / group, ...], so a slab is
    allocated by encoding zeros, and its groups are replaced by indexing the dimension behind `lead`. Parts are uint8
    and float16 (those of `model` aside), which every device can gather, scatter and copy. Encoding computes in float32.
    """

    name: str  # as a part of a policy: kivi4 in snapkv@0.2+kivi4
    alias = ""  # the policy that is the full cache in it: kivi
    bits = 0  # knob of the alias, where several formats share one; the most are its default

    # What it goes with
    decode_rules: tuple[DecodeRule, ...] = ("append", "ring", "argmin")
    head_dim_multiple = 1  # what head_dim must be a multiple of, for the codes of a vector to fill whole bytes
    group = 1  # entries that are encoded together along the token axis; 1 if each stands alone
    residual = 32  # newest entries in the model's dtype by default, a multiple of `group`; none where `group` is 1
    alias_residual: int | None = None  # where the alias is used, if that is another
    plain = False  # one part: the entries as the model computes them
    for_blocks = False  # whether prefix blocks may be kept in it
    rotated = False  # whether decoded entries are in another basis: `to_basis`, `from_basis`

    # The module that reads it inside a Triton kernel (`replicas/slots/kernels/tiles.py`), if there is one
    kernel: str | None = None

    # Columns of the tables in docs/policies.md
    formula = ""  # of `entry_bytes`
    source = ""  # arXiv number, and the code that was read
    deviates = "nothing"  # from that source

    @abstractmethod
    def entry_bytes(self, head_dim: int, dtype_bytes: int) -> float:
        """Return the bytes of the key and the value of one entry of one KV head, with its share of a group's scales.

        `dtype_bytes` is what a number of the model's own type takes.
        """

    @abstractmethod
    def encode_keys(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of keys [*lead, n, head_dim]. Raises ValueError if `group` does not divide n."""

    @abstractmethod
    def decode_keys(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return keys [*lead, n, head_dim] in the basis of `to_basis`."""

    def encode_values(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of values, by default as of keys."""
        return self.encode_keys(values)

    def decode_values(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return values [*lead, n, head_dim] in the basis that `from_basis` leaves, by default as keys."""
        return self.decode_keys(parts, dtype)

    def to_basis(self, x: Tensor) -> Tensor:
        """Return queries [..., head_dim] in the basis of decoded keys; same shape and type."""
        return x

    def from_basis(self, x: Tensor) -> Tensor:
        """Return attention outputs [..., head_dim] out of the basis of decoded values; same shape and type."""
        return x

    def rotation(self, head_dim: int, device: torch.device) -> Tensor:
        """Return the matrix [head_dim, head_dim], float32, by which `to_basis` multiplies; `from_basis` undoes it."""
        import torch

        return self.to_basis(torch.eye(head_dim, device=device))

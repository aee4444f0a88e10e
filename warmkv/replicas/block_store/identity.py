"""What KV must have in common to be exchanged: the model's weights, the number format, the shape, the block size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from warmkv.policies.slot_sizes import KVShape
from warmkv.replicas.loading.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Identity:
    """Block hashes cover the tenant, the model's name, revision, dtype and the block size as they are configured.

    Files outlive a configuration, so theirs is what was really computed with: `auto` is another dtype on another
    machine, and a folder of weights may have changed under its name.
    """

    model: str  # its class and name, for people
    weights: str  # fingerprint of weights and rotation
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int

    @classmethod
    def of(cls, model: LoadedModel, block_size: int) -> Identity:
        shape, module = model.kv_shape, model.module
        name = f"{type(module).__name__} {module.config._name_or_path}".strip()
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(name, model.weights, dtype, shape.layers, shape.kv_heads, shape.head_dim, block_size)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim, self.torch_dtype.itemsize)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def differs(self, document: object) -> str:
        """Return in what respect KV of another identity, as `document` gives it, is unlike; empty if it fits."""
        if not isinstance(document, Mapping):
            return "it names no model"
        names = [field.name for field in fields(self) if field.name != "model"]
        return ", ".join(
            f"{name} is {document.get(name)!r}, not {getattr(self, name)!r}"
            for name in names
            if document.get(name) != getattr(self, name)
        )

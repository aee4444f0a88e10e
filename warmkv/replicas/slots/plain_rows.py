"""Rows of several slabs that hold their entries as they are, attended by one call where a kernel for CPUs is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from warmkv.policies.compression import cpu_attention
from warmkv.replicas.slots.rows import Ints
from warmkv.replicas.slots.slabs import Slab


class SlabRows(NamedTuple):
    """Rows of a slab in a step, each int64 [n]: their numbers, entries for new tokens, lengths, places in the batch."""

    slab: Slab
    rows: Ints
    entries: Ints
    lengths: Ints
    places: Ints


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The rows of a decode step in some layers, of float32 on a CPU. They must stay where they are until it ends."""

    slabs: Sequence[Slab]
    first: Ints  # [2, n] addresses of keys and values in the first layer of each row's slab
    step: Ints  # [n] from layer to layer
    layers: Ints  # [n] the first ones
    entries: Tensor
    lengths: Tensor
    places: Tensor

    @classmethod
    def of(cls, parts: Sequence[SlabRows]) -> PlainRows:
        """Return the rows of slabs that are plain."""
        first, step, layers = [], [], []
        for slab, rows, *_ in parts:
            tensors = slab.memory.keys[0], slab.memory.values[0]
            size, (layer, row, *_) = tensors[0].element_size(), tensors[0].stride()
            first.append(np.stack([tensor.data_ptr() + rows * (row * size) for tensor in tensors]))
            step.append(np.full(len(rows), layer * size))
            layers.append(np.full(len(rows), slab.layers[0]))
        together = (np.concatenate([part[at] for part in parts]) for at in range(2, 5))
        entries, lengths, places = (torch.from_numpy(column.astype(np.int64)) for column in together)
        slabs = [part.slab for part in parts]
        ends = np.concatenate(first, axis=1), np.concatenate(step), np.concatenate(layers)
        return cls(slabs, *ends, entries, lengths, places)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        """Put key and value [places, d] in, and attend q [places, group, d]; `out` of its shape takes what rows get.

        May be called again with the same tensors. Raises RuntimeError if there is no memory; nothing has changed then.
        """
        keys, values = torch.from_numpy(self.first + (layer - self.layers) * self.step)
        rows = self.entries, self.lengths, self.places
        cpu_attention.attend_rows(query, key, value, keys, values, *rows, scale, out)

"""The rows of one kind that a slot has in consecutive layers: filled at the hand-off, swapped, rotated back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warmkv.policies.slot_sizes import RowKind
from warmkv.replicas.slots.row_memory import RowMemory
from warmkv.replicas.slots.rows import RowTable


@dataclass(frozen=True, slots=True)
class Piece:
    """Name rows by their bookkeeping and by their place in memory; they have the same bookkeeping in all layers."""

    layers: range
    kind: RowKind
    state: RowTable  # in which `rows` are theirs
    rows: list[int]
    memory: RowMemory  # in which they are `at`
    at: list[int]

    @property
    def heads(self) -> list[int]:
        """Return the KV head of each row."""
        heads: list[int] = self.state.head[self.rows].tolist()
        return heads

    @torch.inference_mode()
    def take_out(self) -> tuple[RowTable, list[Tensor]]:
        """Copy what the rows hold to host memory."""
        index = torch.tensor(self.at, device=self._device)
        return self.state.chosen(self.rows), [tensor[:, index].cpu() for tensor in self.memory.tensors()]

    @torch.inference_mode()
    def put_in(self, mine: Sequence[int], state: RowTable, tensors: Sequence[Tensor], which: Sequence[int]) -> None:
        """Fill `mine` of the rows, counted in the piece, with `which` of those taken out of one like it."""
        index, source = torch.tensor([self.at[i] for i in mine], device=self._device), torch.tensor(which)
        for own, tensor in zip(self.memory.tensors(), tensors, strict=True):
            own[:, index] = tensor[:, source].to(self._device)
        self.state.take([self.rows[i] for i in mine], state, which)

    def fill(
        self, layers: range, mine: slice, keys: Tensor, values: Tensor, ages: Tensor, scores: Tensor | None
    ) -> None:
        """Hand over what started rows [n], all alike and neighbours, keep of a prompt in some layers.

        k and v [layers, n, kept, head_dim]; `mine` are counted in the piece; ages and scores [layers, n, kept] are
        positions in the prompt and what was received.
        """
        packed = int(self.state.packed[self.rows[mine.start]]) if self.kind.grouped else keys.shape[2]
        at = slice(self.at[mine.start], self.at[mine.stop - 1] + 1)
        first = self.layers[0]
        self.memory.fill(slice(layers.start - first, layers.stop - first), at, packed, keys, values, ages, scores)

    @torch.inference_mode()
    def rebase(self, angles: Tensor) -> None:
        """Rotate keys back by `angles` [head_dim / 2], but for sinks that are rotated on."""
        self.memory.rebase(torch.tensor(self.at, device=self._device), angles)

    @property
    def _device(self) -> torch.device:
        return self.memory.keys[0].device

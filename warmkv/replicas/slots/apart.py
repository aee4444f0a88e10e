"""Keep each slot's rows in memory of its own, for kernels, which find rows by address.

Nothing is allocated ahead, cleared, moved or kept when a slot is released. Rows of all kinds and layers share one
bookkeeping, so a step costs its host the same however many kinds there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from warmkv.policies.slot_sizes import KVShape, RowKind, row_bytes
from warmkv.replicas.slots.layout import Wanted
from warmkv.replicas.slots.piece import Piece
from warmkv.replicas.slots.row_facts import FACTS, PARTS, facts
from warmkv.replicas.slots.row_memory import RowMemory
from warmkv.replicas.slots.rows import FREE, Ints, RowTable
from warmkv.replicas.slots.slabs import Slab

KIND = RowKind(capacity=0)
"""Stands for all kinds: as rows of the slab they hold nothing."""
LEAST_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Allocation:
    layers: range
    kind: RowKind
    rows: list[int]
    memory: RowMemory


class ApartSlab(Slab):
    """Hold rows of every kind but those packed in groups, which are packed slab by slab and lie in other slabs."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(KIND, range(shape.layers), 0, shape, dtype, device)
        self.is_fused = True
        self._shape = shape
        self._allocations: dict[int, list[_Allocation]] = {}  # by the first row of their slot
        self._allocated = 0
        self._facts: Ints = np.zeros((2 * len(PARTS) + len(FACTS), 0), dtype=np.int64)

    @property
    def allocated_bytes(self) -> int:
        return self._allocated

    def bytes_of(self, rows: Sequence[int]) -> int:
        return sum(self._bytes_of_one(one) for one in self._allocations[rows[0]])

    def _bytes_of_one(self, one: _Allocation) -> int:
        return row_bytes(one.kind, self._shape) * len(one.rows) * len(one.layers)

    def tensors(self) -> list[Tensor]:
        return [tensor for slot in self._allocations.values() for one in slot for tensor in one.memory.tensors()]

    def pieces(self, rows: Sequence[int]) -> list[Piece]:
        return [
            Piece(one.layers, one.kind, self.state, one.rows, one.memory, list(range(len(one.rows))))
            for one in self._allocations[rows[0]]
        ]

    def facts(self) -> Ints:
        return self._facts

    def free_rows(self) -> list[int]:
        """Return none: free rows take no memory, and only `take_rows` gives them to a slot."""
        return []

    def take_rows(self, owner: int, wanted: Sequence[Wanted]) -> list[int]:
        """Allocate and return rows for a slot; the table of rows may be replaced.

        Nothing has changed if memory runs out.
        """
        memories = [
            RowMemory.allocate(kind, len(layers), len(heads), self._shape.head_dim, self.dtype, self._device)
            for layers, kind, heads in wanted
        ]
        rows = self._free(sum(len(heads) for _, _, heads in wanted))
        allocations: list[_Allocation] = []
        for (layers, kind, heads), memory in zip(wanted, memories, strict=True):
            first = sum(len(one.rows) for one in allocations)
            mine = rows[first : first + len(heads)]
            self.state.owner[mine], self.state.head[mine] = owner, heads
            self.state.become(mine, kind)
            self._facts[:, mine] = facts(kind, layers, memory, len(mine))
            allocations.append(_Allocation(layers, kind, mine, memory))
        self._allocations[rows[0]] = allocations
        self._allocated += self.bytes_of(rows)
        return rows

    def _free(self, count: int) -> list[int]:
        """Return `count` free rows; the table doubles if they do not suffice."""
        free: list[int] = np.flatnonzero(self.state.owner == FREE).tolist()
        if len(free) < count:
            more = max(LEAST_ROWS, self.rows, count - len(free))
            self.state = RowTable.join([self.state, RowTable.of_kind(KIND, more)])[0]
            self._facts = np.concatenate([self._facts, np.zeros((len(self._facts), more), dtype=np.int64)], axis=1)
            free += range(self.rows, self.rows + more)
            self.rows += more
        return free[:count]

    def release(self, rows: Sequence[int]) -> None:
        """Free the rows of a slot, and their memory."""
        self._allocated -= self.bytes_of(rows)
        del self._allocations[rows[0]]
        self.state.free(rows)

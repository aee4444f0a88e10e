"""Decode slots: fixed-size pieces of KV memory, so that what a request needs is known at admission and never grows.

Slots of one size class live in slabs of a few rows; a decode batch is the used rows of all slabs. Nothing is moved
while decoding: a new token is appended, or overwrites the oldest entry of a ring behind the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warmkv.policies.budgets import KVShape, size_class, slot_bytes
from warmkv.replicas.attention import attend_grouped, rotate

SLAB_ROWS = 4


@dataclass(slots=True)
class Row:
    """One slot's bookkeeping, in entries of its slab."""

    limit: int = 0  # entries it may use; 0 while its prompt is being computed
    filled: int = 0  # entries in use
    ring: bool = False  # whether it overwrites when all are in use
    cursor: int = 0  # entry of the ring to overwrite next
    dropped: int = 0  # tokens that left its cache, at the hand-off or since


class Slab:
    """Rows of slots of one size class: keys and values [layers, rows, kv_heads, capacity, head_dim].

    The sinks of a ring keep their cached keys apart, [layers, rows, kv_heads, sinks, head_dim], and enter attention
    rotated on by what has been dropped: always from the original, so that no error adds up.
    """

    def __init__(self, shape: KVShape, capacity: int, sinks: int, rows: int, dtype: torch.dtype, device: torch.device):
        self.capacity, self.sinks = capacity, sinks
        size = (shape.layers, rows, shape.kv_heads)
        self.keys = torch.zeros(*size, capacity, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._sink_keys = torch.zeros(*size, sinks, shape.head_dim, dtype=dtype, device=device)
        self.row_bytes = slot_bytes(shape, capacity, sinks)
        self._rows: list[Row | None] = [None] * rows

    @property
    def allocated_bytes(self) -> int:
        return self.row_bytes * len(self._rows)

    @property
    def batch_rows(self) -> int:
        """Rows up to the highest one that decodes: the part of the slab that a step computes."""
        return max((index + 1 for index in range(len(self._rows)) if self.is_active(index)), default=0)

    @property
    def is_empty(self) -> bool:
        return not any(self._rows)

    def free_row(self) -> int | None:
        """The lowest free row, so that used rows stay together."""
        return next((index for index, row in enumerate(self._rows) if row is None), None)

    def claim(self, index: int) -> None:
        self._rows[index] = Row()

    @torch.inference_mode()
    def release(self, index: int) -> None:
        """Free a row. It is cleared, for masked entries still enter attention with weight 0, and 0 * NaN is NaN."""
        self._rows[index] = None
        self.keys[:, index].zero_()
        self.values[:, index].zero_()

    def is_active(self, index: int) -> bool:
        """Whether the row decodes; a claimed row does from `start` on."""
        row = self._rows[index]
        return row is not None and row.limit > 0

    def row(self, index: int) -> Row:
        row = self._rows[index]
        assert row is not None
        return row

    def fill(self, index: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Hand over what a layer keeps of a prompt: keys and values [kv_heads, n, head_dim]."""
        count = keys.shape[1]
        self.keys[layer, index, :, :count] = keys
        self.values[layer, index, :, :count] = values

    def start(self, index: int, *, limit: int, filled: int, dropped: int, ring: bool) -> None:
        """Begin to decode a row whose layers have all been filled."""
        self._rows[index] = Row(limit, filled, ring, self.sinks, dropped)
        if dropped:
            self._keep_sinks(index)

    def advance(self, index: int) -> int:
        """Entry for the row's next token."""
        row = self.row(index)
        if row.filled < row.limit:
            row.filled += 1
            return row.filled - 1
        if not row.ring:
            raise RuntimeError(f"a slot of {row.limit} entries is full and its policy does not overwrite")
        if not row.dropped:
            self._keep_sinks(index)
        row.dropped += 1
        entry = row.cursor
        row.cursor = entry + 1 if entry + 1 < row.limit else self.sinks
        return entry

    def length(self, index: int) -> int:
        """Entries that attention may see; 1 for an unused row, whose output nobody reads."""
        return self.row(index).filled if self.is_active(index) else 1

    def rolled(self) -> list[int]:
        """Rows of a ring whose sinks must be rotated on."""
        return [index for index, row in enumerate(self._rows) if row and row.ring and row.dropped and self.sinks]

    def _keep_sinks(self, index: int) -> None:
        self._sink_keys[:, index] = self.keys[:, index, :, : self.sinks]

    def place_sinks(self, layer: int, rows: Tensor, angles: Tensor) -> None:
        """Write the sinks of `rows` [n] rotated on by `angles` [n, head_dim / 2]."""
        self.keys[layer, rows, :, : self.sinks] = rotate(self._sink_keys[layer, rows], angles[:, None, None])


@dataclass(frozen=True, slots=True)
class Slot:
    """A claimed row."""

    slab: Slab
    row: int

    @property
    def resident_bytes(self) -> int:
        return self.slab.row_bytes

    def release(self) -> None:
        self.slab.release(self.row)


class SlotPool:
    """All slabs of a replica, allocated when first needed and given back when another size needs the room."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self.slabs: list[Slab] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(slab.allocated_bytes for slab in self.slabs)

    def batch(self) -> list[Slot]:
        """The rows of a decode step in their order, idle ones between active ones included."""
        return [Slot(slab, row) for slab in self.slabs for row in range(slab.batch_rows)]

    def claim(self, capacity: int, sinks: int, limit: int) -> Slot | None:
        """A slot of at least `capacity` entries, or None if all slabs with it would take more than `limit` bytes.

        Empty slabs of other sizes are given back before the answer is None. A new slab takes at most a quarter of
        the room that is left, so that one size does not starve the others.
        """
        capacity = size_class(capacity)
        for slab in self.slabs:
            if (slab.capacity, slab.sinks) == (capacity, sinks) and (row := slab.free_row()) is not None:
                if not self.fit(limit, but=slab):
                    return None
                slab.claim(row)
                return Slot(slab, row)
        one = slot_bytes(self._shape, capacity, sinks)
        if not self.fit(limit - one):
            return None
        rows = max(1, min(SLAB_ROWS, (limit - self.allocated_bytes) // (4 * one)))
        slab = Slab(self._shape, capacity, sinks, rows, self._dtype, self._device)
        self.slabs.append(slab)
        slab.claim(0)
        return Slot(slab, 0)

    def fit(self, limit: int, but: Slab | None = None) -> bool:
        """Whether all slabs take at most `limit` bytes, after empty ones (`but` one) were given back if need be."""
        if self.allocated_bytes > limit:
            self.slabs = [slab for slab in self.slabs if slab is but or not slab.is_empty]
        return self.allocated_bytes <= limit


@dataclass(frozen=True, slots=True)
class _Part:
    """What one slab does in a step, as tensors made once for all layers."""

    slab: Slab
    batch: slice  # its rows of the batch
    rows: Tensor  # [n] 0..n-1
    entries: Tensor  # [n] where each row's new token goes
    mask: Tensor  # [n, 1, 1, capacity] True is seen
    rolled: Tensor  # rows whose sinks are rotated on
    angles: Tensor  # [rolled, head_dim / 2] by how much


class DecodeState:
    """One decode step over the used rows of all slabs; the batch is their concatenation, slab by slab."""

    def __init__(self, slabs: list[Slab], inv_freq: Tensor) -> None:
        self._parts: list[_Part] = []
        first, device = 0, inv_freq.device
        for slab in slabs:
            n = slab.batch_rows
            if not n:
                continue
            entries = [slab.advance(i) if slab.is_active(i) else 0 for i in range(n)]
            lengths = torch.tensor([slab.length(i) for i in range(n)], device=device)
            mask = torch.arange(slab.capacity, device=device) < lengths[:, None]
            rolled = slab.rolled()
            dropped = torch.tensor([slab.row(i).dropped for i in rolled], dtype=torch.float64, device=device)
            part = _Part(
                slab=slab,
                batch=slice(first, first + n),
                rows=torch.arange(n, device=device),
                entries=torch.tensor(entries, device=device),
                mask=mask[:, None, None],
                rolled=torch.tensor(rolled, dtype=torch.long, device=device),
                angles=dropped[:, None] * inv_freq,
            )
            self._parts.append(part)
            first += n

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        outputs = []
        for part in self._parts:
            keys, values, n = part.slab.keys[layer], part.slab.values[layer], len(part.rows)
            keys[part.rows, :, part.entries] = key[part.batch, :, 0]
            values[part.rows, :, part.entries] = value[part.batch, :, 0]
            if len(part.rolled):
                part.slab.place_sinks(layer, part.rolled, part.angles)
            outputs.append(attend_grouped(query[part.batch], keys[:n], values[:n], part.mask, scale))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

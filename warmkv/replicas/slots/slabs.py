"""Slabs: the memory of decode slots. A row is one KV head's cache of one sequence; a slab holds rows of one kind.

Nothing is moved while decoding: a new token is appended, or overwrites the entry that the decode rule gives up. Where
entries are packed in groups, new ones wait in the tail of the row until a group of them is packed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape, RowKind, row_bytes
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots import kernels, row_by_row
from warmkv.replicas.slots.attention import Parts, attend_packed, attend_rows, attend_segments, rotate, sum_heads
from warmkv.replicas.slots.attention_metadata import AttentionMetadata, Progress, RowMetadata
from warmkv.replicas.slots.piece import Piece
from warmkv.replicas.slots.row_facts import NOT_FUSED, facts, line
from warmkv.replicas.slots.row_memory import RowMemory
from warmkv.replicas.slots.rows import EVICTED_LAST, FREE, Bools, Ints, PendingPack, RowTable, seen_uncompressed

PACKED_AT_ONCE = 1 << 24
"""Numbers that are packed at a time, in as many layers as they are of."""


class Slab:
    """Hold rows of one kind in consecutive layers, with the same bookkeeping in all of them.

    `memory` has their contents, `state` their bookkeeping.
    """

    def __init__(
        self, kind: RowKind, layers: range, rows: int, shape: KVShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kind, self.layers, self.rows = kind, layers, rows
        self.storage = STORAGES[kind.storage]
        self._row_bytes, self.dtype, self._device = row_bytes(kind, shape), dtype, device
        self._kv_heads = shape.kv_heads
        self.memory = RowMemory.allocate(kind, len(layers), rows, shape.head_dim, dtype, device)
        # Whether rows hold their entries as they are, see all of them, and keep nothing beside.
        self.is_plain = self.storage.plain and not (kind.grouped or kind.aged or kind.segment or kind.rebased)
        # Whether kernels attend them, which find rows by themselves.
        self.is_fused = kernels.supports(self.storage, dtype, device)
        self._counting = torch.arange(max(rows, kind.packed), device=device)
        self.state = RowTable.of_kind(kind, rows)

    @property
    def allocated_bytes(self) -> int:
        return self._row_bytes * self.rows * len(self.layers)

    @property
    def is_empty(self) -> bool:
        return bool((self.state.owner == FREE).all())

    def tensors(self) -> list[Tensor]:
        """Return everything that its rows hold."""
        return self.memory.tensors()

    def free_rows(self) -> list[int]:
        return np.flatnonzero(self.state.owner == FREE).tolist()

    def bytes_of(self, rows: Sequence[int]) -> int:
        """Return the bytes of the rows of a slot."""
        return self._row_bytes * len(rows) * len(self.layers)

    def pieces(self, rows: Sequence[int]) -> list[Piece]:
        """Return the rows of a slot, by kind and layers."""
        return [Piece(self.layers, self.kind, self.state, list(rows), self.memory, list(rows))]

    def facts(self) -> Ints:
        """Return the facts of rows for kernels, [2 * parts + facts, rows]."""
        found = facts(self.kind, self.layers, self.memory, self.rows)
        if not self.is_fused:
            found[line("storage")] = NOT_FUSED
        return found

    def claim(self, row: int, owner: int, head: int) -> None:
        self.state.owner[row], self.state.head[row] = owner, head

    @torch.inference_mode()
    def release(self, rows: Sequence[int]) -> None:
        """Free and clear rows: masked entries still enter attention with weight 0, and 0 * NaN is NaN."""
        self.state.free(rows)
        for tensor in self.memory.tensors():
            for row in rows:
                tensor[:, row].zero_()

    @torch.inference_mode()
    def compact(self) -> dict[int, int]:
        """Give back free rows; return the new number of each other row."""
        used: list[int] = np.flatnonzero(self.state.owner != FREE).tolist()
        index = torch.tensor(used, dtype=torch.long, device=self._device)
        self.memory = self.memory.map(lambda tensor: tensor.index_select(1, index))
        self.state, self.rows = self.state.chosen(used), len(used)
        return {row: at for at, row in enumerate(used)}

    # --- a decode step

    def make_room(self, entries: Ints, active: Bools) -> None:
        """Allocate room for new tokens of active rows at `entries`, in slabs that grow."""

    def plan(
        self,
        host: RowMetadata[Ints],
        device: RowMetadata[Tensor],
        active: Bools,
        full: Bools,
        inv_freq: Tensor,
        *,
        alone: bool = False,
    ) -> AttentionMetadata:
        """Build the metadata of a step over the first n rows, whose bookkeeping has advanced already; active, full bool
        [n]. `alone`: rows are attended one by one.
        """
        kind, n = self.kind, len(active)
        reach = int(host.packed.max())
        rows = np.flatnonzero(active).tolist() if alone else []
        uncompressed_tail = self._upload(seen_uncompressed(self.state.first(n), active, kind)) if kind.grouped else None
        return AttentionMetadata(
            numbers=device,
            rows=self._counting[:n],
            full=self._upload(full) if kind.decode == "argmin" and not kind.grouped and full.any() else None,
            reach=reach,
            masked=not kind.segment and (kind.grouped or bool(reach > host.packed.min())),
            dtype=self.dtype,
            uncompressed_tail=uncompressed_tail,
            angles=device.rerotated.double()[:, None] * inv_freq if kind.rebased and kind.sinks else None,
            most_read=int(host.read_limit.max()) if kind.segment else 0,
            alone=[(row, int(host.packed[row]), int(host.read_limit[row])) for row in rows] if alone else None,
        )

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def attend(
        self, layer: int, step: AttentionMetadata, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        """Put the new token of each row in and attend: q [n, group, d], k and v [n, d]; returns the shape of q.

        May be called again with the same step if it failed here or in a later layer, and gives the same.
        """
        at, n = layer - self.layers[0], step.used
        done = step.progress.setdefault(layer, Progress())
        if done.entries is None:
            done.entries = self._places(at, step)
        kind, used, memory = self.kind, step.numbers, self.memory
        entries = self._write(at, step, done.entries, key, value)
        if kind.segment:
            if not done.attended:
                self._widen_segment(at, step, key)
                done.attended = True
            keys, values = memory.keys[0][at, :n], memory.values[0][at, :n]
            bounds = memory.lowest[at, :n], memory.highest[at, :n]
            gathered = query, keys, values, *bounds, used.lengths, used.read_limit, used.channels
            if step.alone is not None:
                return row_by_row.attend_chosen(gathered, step, softmax)
            return attend_segments(*gathered, step.most_read, softmax)
        uncompressed_tail = None
        if kind.grouped:
            uncompressed_tail = memory.uncompressed_keys[at, :n], memory.uncompressed_values[at, :n]
        if uncompressed_tail and step.angles is not None:
            first = rotate(uncompressed_tail[0][:, : kind.front], step.angles[:, None])
            uncompressed_tail = torch.cat([first, uncompressed_tail[0][:, kind.front :]], dim=1), uncompressed_tail[1]
        scores = None
        if kind.decode == "argmin":
            scores = self.memory.scores[at, :n]
            if done.attended:
                scores = scores.clone()  # what is received was counted
            else:
                scores[step.rows, entries] = 0.0
        if kind.aged and not done.attended:
            self.memory.ages[at, step.rows, entries] = used.ages.to(torch.int32)
        out = self._attend_plain(at, step, query, uncompressed_tail, scores, softmax)
        done.attended = True
        return out

    def _attend_plain(
        self,
        at: int,
        step: AttentionMetadata,
        query: Tensor,
        uncompressed_tail: tuple[Tensor, Tensor] | None,
        scores: Tensor | None,
        softmax: Softmax,
    ) -> Tensor:
        bias = self._in_window(at, step) if self.kind.window else step.bias
        is_scored = scores is not None
        if step.alone is None:
            rows = slice(0, step.used)
            out, shares = self._read(at, is_scored, rows, step.reach, query, uncompressed_tail, bias, softmax)
        else:
            if not (self.kind.grouped or self.kind.window):
                bias = None  # each sees all that it reaches
            read = partial(self._read, at, is_scored)
            out, shares = row_by_row.attend(read, step, query, uncompressed_tail, bias, softmax)
        if scores is not None:
            received = shares.sum(dim=1)
            if self.kind.alike:
                received = sum_heads(received, self._kv_heads)
            for mine, fresh in (
                (scores[:, : step.reach], received[:, : step.reach]),
                (scores[:, self.kind.packed :], received[:, step.reach :]),
            ):
                mine.copy_(fresh) if self.kind.replaces else mine.add_(fresh)
        return out

    def _read(
        self,
        at: int,
        is_scored: bool,
        rows: slice,
        reach: int,
        query: Tensor,
        uncompressed_tail: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
        softmax: Softmax,
    ) -> tuple[Tensor, Tensor]:
        """Attend rows up to an entry; return the output and the shares of entries, 0-d where none are scored."""
        groups = reach // self.storage.group
        keys, values = (
            tuple(part[at, rows, :groups] for part in parts) for parts in (self.memory.keys, self.memory.values)
        )
        if self.storage.plain and not is_scored:
            return attend_rows(query, keys[0], values[0], bias, softmax), query.new_zeros(())
        return attend_packed(query, self.storage, keys, values, uncompressed_tail, bias, softmax)

    def _in_window(self, at: int, step: AttentionMetadata) -> Tensor:
        """Return a step's bias [n, reach + front + tail] with entries outside the window masked."""
        ages = self.memory.ages[at, : step.used]
        ages = torch.cat([ages[:, : step.reach], ages[:, self.kind.packed :]], dim=1)
        left = ages <= step.numbers.ages[:, None] - self.kind.window
        bias = step.bias if step.bias is not None else torch.zeros(left.shape, dtype=self.dtype, device=self._device)
        return bias.masked_fill(left, float("-inf"))

    def _places(self, at: int, step: AttentionMetadata) -> Tensor:
        """Return the entry for each row's new token, int64 [n]; in rows full under argmin, that of the lowest score."""
        if step.full is None:
            return step.numbers.entries
        numbers = step.numbers
        least = self._least(at, step.rows, numbers.before, numbers.oldest, numbers.early, numbers.ages, 1)[:, 0]
        return torch.where(step.full, least, step.numbers.entries)

    def _write(self, at: int, step: AttentionMetadata, entries: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write each row's new token to its place; return the entries [n] that hold it."""
        kind = self.kind
        if kind.grouped:
            self.memory.uncompressed_keys[at, step.rows, entries] = key
            self.memory.uncompressed_values[at, step.rows, entries] = value
            return kind.packed + entries
        index, storage = (at, step.rows, entries), self.storage
        for parts, encode, entry in (
            (self.memory.keys, storage.encode_keys, key[:, None]),
            (self.memory.values, storage.encode_values, value[:, None]),
        ):
            encoded = encode(entry) if step.alone is None else row_by_row.encode(encode, entry)
            _put(parts, index, tuple(part[:, 0] for part in encoded))
        if step.angles is not None:
            early, first = (entries < kind.sinks)[:, None], entries.clamp(max=kind.sinks - 1)
            self.memory.sink_keys[at, step.rows, first] = torch.where(
                early, key, self.memory.sink_keys[at, step.rows, first]
            )
            sinks = rotate(self.memory.sink_keys[at, : step.used], step.angles[:, None])
            _put(self.memory.keys, (at, slice(0, step.used), slice(0, kind.sinks)), self.storage.encode_keys(sinks))
        return entries

    def _least(
        self, at: int | slice, rows: Tensor, in_use: Tensor, oldest: Tensor, early: Tensor, newest: Tensor, count: int
    ) -> Tensor:
        """Return `count` packed entries of each row [..., n, count] by ascending score, recent and protected ones last.

        Rows may be those of one layer or of several.
        """
        scores, ages = (tensor[at, rows, : self.kind.packed] for tensor in (self.memory.scores, self.memory.ages))
        used = self._counting[: self.kind.packed] < in_use[:, None]
        scores = torch.where((ages > oldest[:, None]) | (ages < early[:, None]), scores + EVICTED_LAST, scores)
        if self.kind.window:  # nothing sees what has left the window
            scores = scores.masked_fill(ages <= newest[:, None] - self.kind.window, float("-inf"))
        scores = scores.masked_fill(~used, float("inf"))
        if count > 1:
            return scores.argsort(dim=-1, stable=True)[..., :count]
        least = scores.amin(dim=-1, keepdim=True)  # the oldest of equals goes
        return ages.masked_fill(scores > least, torch.iinfo(ages.dtype).max).argmin(dim=-1, keepdim=True)

    @torch.inference_mode()
    def pack(self, due: PendingPack, ages: Ints, packed: set[int]) -> None:
        """Pack a group of waiting entries of some rows, many layers at once; `packed` takes those in which it is done.

        ages [rows] are positions of the new tokens. May be called again if memory runs out.
        """
        count, group = len(due.rows), self.storage.group
        touched = count * (self.kind.packed if due.groups is None else group)
        at_once = max(1, PACKED_AT_ONCE // (touched * self.memory.uncompressed_keys.shape[-1]))
        numbers = np.stack(
            [
                due.rows,
                due.packed,
                ages[due.rows],
                (ages - self.state.recent)[due.rows],
                self.state.protected[due.rows],
                np.zeros(count) if due.groups is None else due.groups,
            ]
        )
        index = np.concatenate([numbers.astype(np.int64), due.waiting.T])
        uploaded = self._upload(index)
        rows, in_use, newest, oldest, early, groups = uploaded[:6].unbind()
        waiting = uploaded[6:].T
        for first in range(len(packed), len(self.layers), at_once):  # they are packed in their order
            layers = slice(first, min(first + at_once, len(self.layers)))
            if due.groups is None:
                entries = self._least(layers, rows, in_use, oldest, early, newest, group)
                self._pack_over(layers, rows, waiting, entries)
            else:
                self._pack_group(layers, rows, waiting, groups)
            packed.update(range(layers.start, layers.stop))

    def _pack_group(self, layers: slice, rows: Tensor, waiting: Tensor, groups: Tensor) -> None:
        """Pack waiting entries [m, group] of rows [m] to groups [m]."""
        keys, values = self._waiting(layers, rows, waiting)
        packed_keys = tuple(part[:, :, 0] for part in self.storage.encode_keys(keys))
        packed_values = tuple(part[:, :, 0] for part in self.storage.encode_values(values))
        group = self.storage.group
        entries = groups[:, None] * group + torch.arange(group, device=self._device)
        counted = self._counted(layers, rows, waiting)
        _put(self.memory.keys, (layers, rows, groups), packed_keys)
        _put(self.memory.values, (layers, rows, groups), packed_values)
        for mine, moved in counted:
            mine[layers, rows[:, None], entries] = moved

    def _pack_over(self, layers: slice, rows: Tensor, waiting: Tensor, entries: Tensor) -> None:
        """Pack waiting entries [m, group] of rows [m] over entries [layers, m, group].

        Groups that receive one are packed anew; the others come out as they were.
        """
        keys, values = self._waiting(layers, rows, waiting)
        old = self.storage.decode_keys(tuple(part[layers, rows] for part in self.memory.keys), torch.float32)
        packed_keys = self.storage.encode_keys(_replaced(old, entries, keys))
        old = self.storage.decode_values(tuple(part[layers, rows] for part in self.memory.values), torch.float32)
        packed_values = self.storage.encode_values(_replaced(old, entries, values))
        counted = self._counted(layers, rows, waiting)
        # All is computed before anything is changed, so that a step in which memory runs out here can be repeated.
        _put(self.memory.keys, (layers, rows), packed_keys)
        _put(self.memory.values, (layers, rows), packed_values)
        for mine, moved in counted:
            mine[layers, rows] = mine[layers, rows].scatter(-1, entries, moved)

    def _waiting(self, layers: slice, rows: Tensor, waiting: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [layers, m, group, head_dim] that wait at these places of the tail."""
        index = layers, rows[:, None], self.kind.front + waiting
        return self.memory.uncompressed_keys[index], self.memory.uncompressed_values[index]

    def _counted(self, layers: slice, rows: Tensor, waiting: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return scores and ages, if they are kept, and those of the entries that wait at these places of the tail."""
        at = self.kind.packed + self.kind.front + waiting
        kept = [mine for mine in (self.memory.scores, self.memory.ages) if mine.shape[-1]]
        return [(mine, mine[layers, rows[:, None], at]) for mine in kept]

    def _widen_segment(self, at: int, step: AttentionMetadata, key: Tensor) -> None:
        """Widen the bounds of segments by the new keys."""
        entries, size = step.numbers.entries, self.kind.segment
        segment, fresh = entries // size, (entries % size == 0)[:, None]
        for bounds, wider in ((self.memory.lowest, torch.minimum), (self.memory.highest, torch.maximum)):
            old = bounds[at, step.rows, segment]
            bounds[at, step.rows, segment] = torch.where(fresh, key, wider(old, key))


def _put(parts: Parts, index: tuple[Any, ...], fresh: Parts) -> None:
    for part, new in zip(parts, fresh, strict=True):
        part[index] = new


def _replaced(old: Tensor, entries: Tensor, new: Tensor) -> Tensor:
    """Replace `entries` [..., k] of each row of old [..., n, d] by new [..., k, d]."""
    return old.scatter(-2, entries[..., None].expand(*entries.shape, old.shape[-1]), new.to(old.dtype))

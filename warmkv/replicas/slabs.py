"""Slabs: the memory of decode slots. A row is one KV head's cache of one sequence; a slab holds rows of one kind.

Nothing is moved while decoding: a new token is appended, or overwrites the entry that the decode rule gives up. Where
entries are packed in groups, new ones wait in the tail of the row until a group of them is packed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from warmkv.policies.compression.storage import codec
from warmkv.policies.slot_sizes import KVShape, RowKind, row_bytes
from warmkv.policies.storage_bytes import KIVI_GROUP
from warmkv.replicas.attention import Parts, attend_packed, attend_pages, attend_rows, rotate

RECENT = 1e30
"""Added to the score of recent entries, so that argmin takes them last."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of which a group of waiting entries is packed before the step."""

    rows: Tensor  # [m]
    waiting: Tensor  # [m, KIVI_GROUP] their places in the tail
    groups: Tensor | None  # [m] where they go; None: over the entries with the lowest scores
    in_use: Tensor  # [m] packed entries in use
    oldest: Tensor  # [m] age above which entries are recent


@dataclass(frozen=True, slots=True)
class Step:
    """What a slab does in a decode step, as tensors made once for all its layers, n rows."""

    used: int
    rows: Tensor  # [n] 0..n-1
    entries: Tensor  # [n] where each row's new token goes (of front and tail, where there are any)
    full: Tensor | None  # [n] bool: argmin rows that give up an entry for it; None if no row does
    reach: int  # packed entries up to the last that any row uses
    mask: Tensor | None  # bool [n, reach + front + tail], True is seen, the new token included; None if all are
    lengths: Tensor  # [n] entries in use
    ages: Tensor  # [n] position of the new token in its sequence
    in_use: Tensor  # [n] entries in use before
    oldest: Tensor  # [n] age above which entries are recent
    angles: Tensor | None  # [n, head_dim / 2] by how much sinks are rotated on
    pages: Tensor  # [n] pages that may be read
    most_pages: int
    packing: tuple[Packing, ...]


@dataclass(slots=True)
class RowState:
    """Bookkeeping of all rows of a slab, on the host: each int64 [rows]."""

    count: Ints  # entries ever put in
    limit: Ints  # entries that may be in use
    recent: Ints  # newest entries that argmin never gives up
    pages: Ints  # pages that may be read
    head: Ints  # KV head of the sequence that the row belongs to
    packed_limit: Ints  # grouped: packed entries that may be in use
    packed: Ints  # packed entries in use
    cursor: Ints  # packed entry of a ring that is overwritten next
    tail_limit: Ints  # entries that may wait
    tail_start: Ints  # the oldest of them
    waiting: Ints  # how many do

    @classmethod
    def empty(cls, rows: int) -> RowState:
        return cls(*(np.zeros(rows, dtype=np.int64) for _ in fields(cls)))

    def first(self, rows: int) -> RowState:
        """The same of the first rows only, as views."""
        return RowState(*(getattr(self, field.name)[:rows] for field in fields(self)))

    def chosen(self, rows: list[int]) -> RowState:
        """The same of some rows, as copies."""
        return RowState(*(getattr(self, field.name)[rows] for field in fields(self)))

    def clear(self, row: int) -> None:
        for field in fields(self):
            getattr(self, field.name)[row] = 0


class Slab:
    """Rows of one kind in consecutive layers; a row has the same bookkeeping in all of them.

    Keys and values are parts of the kind's codec, each [layers, rows, packed / group, ...]; beside them, in the
    model's dtype, stand the front and the tail [layers, rows, front + tail, head_dim].
    """

    def __init__(
        self, kind: RowKind, layers: range, rows: int, shape: KVShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kind, self.layers, self.rows = kind, layers, rows
        self.codec = codec(kind.storage)
        self._row_bytes, self._device = row_bytes(kind, shape), device

        def room(entries: int) -> Tensor:
            return torch.zeros(len(layers), rows, entries, shape.head_dim, dtype=dtype, device=device)

        example = torch.zeros(self.codec.group, shape.head_dim, dtype=dtype, device=device)
        lead = (len(layers), rows, kind.packed // self.codec.group)
        self.keys, self.values = (
            tuple(torch.zeros(*lead, *part.shape[1:], dtype=part.dtype, device=device) for part in parts)
            for parts in (self.codec.encode_keys(example), self.codec.encode_values(example))
        )
        self.beside_keys, self.beside_values = room(kind.front + kind.tail), room(kind.front + kind.tail)
        self._sink_keys = room(kind.sinks if kind.rebased and not kind.front else 0)  # as cached
        scored = kind.capacity if kind.decode == "argmin" else 0
        self._scores = torch.zeros(len(layers), rows, scored, dtype=torch.float32, device=device)
        self._ages = torch.zeros(len(layers), rows, scored, dtype=torch.int32, device=device)
        pages = kind.packed // kind.page if kind.page else 0
        self._lowest, self._highest = room(pages), room(pages)
        self.state = RowState.empty(rows)
        self.owners: list[int | None] = [None] * rows  # id of the slot that each row belongs to

    @property
    def allocated_bytes(self) -> int:
        return self._row_bytes * self.rows * len(self.layers)

    def tensors(self) -> list[Tensor]:
        """Everything that is allocated."""
        beside = [self.beside_keys, self.beside_values, self._sink_keys, self._scores, self._ages]
        return [*self.keys, *self.values, *beside, self._lowest, self._highest]

    @property
    def is_empty(self) -> bool:
        return all(owner is None for owner in self.owners)

    def free_rows(self) -> list[int]:
        return [row for row, owner in enumerate(self.owners) if owner is None]

    def claim(self, row: int, owner: int, head: int) -> None:
        self.owners[row] = owner
        self.state.head[row] = head

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Free a row. It is cleared, for masked entries still enter attention with weight 0, and 0 * NaN is NaN."""
        self.owners[row] = None
        self.state.clear(row)
        for tensor in self.tensors():
            tensor[:, row].zero_()

    @torch.inference_mode()
    def compact(self) -> dict[int, int]:
        """Give back all free rows; where each other row went."""
        used = [row for row, owner in enumerate(self.owners) if owner is not None]
        index = torch.tensor(used, dtype=torch.long, device=self._device)

        def chosen(tensor: Tensor) -> Tensor:
            return tensor.index_select(1, index)

        self.keys, self.values = tuple(map(chosen, self.keys)), tuple(map(chosen, self.values))
        self.beside_keys, self.beside_values = chosen(self.beside_keys), chosen(self.beside_values)
        self._sink_keys, self._scores, self._ages = map(chosen, (self._sink_keys, self._scores, self._ages))
        self._lowest, self._highest = chosen(self._lowest), chosen(self._highest)
        self.state, self.owners, self.rows = self.state.chosen(used), [self.owners[row] for row in used], len(used)
        return {row: at for at, row in enumerate(used)}

    # --- from the hand-off

    def start(self, row: int, *, kept: int, limit: int, packed_limit: int, recent: int, pages: int) -> None:
        """Set a row up that begins with `kept` entries and will use at most `limit`.

        Of a grouped row, `packed_limit` entries may be packed; the `recent` newest ones are never the argmin's.
        """
        state, kind = self.state, self.kind
        if kind.decode == "ring" and limit <= kind.sinks:
            raise ValueError(f"a ring of {limit} entries leaves no room behind {kind.sinks} sinks")
        state.count[row], state.limit[row], state.recent[row], state.pages[row] = kept, limit, recent, pages
        if kind.tail:
            front = min(kept, kind.front)
            state.packed_limit[row] = packed_limit
            # What whole groups cannot use of an evicting row's limit, the tail does.
            state.tail_limit[row] = kind.tail if kind.decode == "append" else limit - kind.front - packed_limit
            more = max(0, kept - front - int(state.tail_limit[row]))
            state.packed[row] = -(-more // KIVI_GROUP) * KIVI_GROUP
            state.waiting[row] = kept - front - state.packed[row]

    def fill(self, layer: int, rows: slice, keys: Tensor, values: Tensor, ages: Tensor, scores: Tensor | None) -> None:
        """Hand over what started rows [n], all alike, keep of a prompt: keys and values [n, kept, head_dim].

        ages and scores [n, kept] are positions in the prompt and the attention received.
        """
        kind, at, kept = self.kind, layer - self.layers[0], keys.shape[1]
        front = min(kept, kind.front)
        packed = int(self.state.packed[rows.start]) if kind.tail else kept
        body, tail = slice(front, front + packed), slice(kind.front, kind.front + kept - front - packed)
        for parts, beside, given, encode in (
            (self.keys, self.beside_keys, keys, self.codec.encode_keys),
            (self.values, self.beside_values, values, self.codec.encode_values),
        ):
            if packed:
                for part, fresh in zip(parts, encode(given[:, body]), strict=True):
                    part[at, rows, : fresh.shape[1]] = fresh
            beside[at, rows, :front] = given[:, :front]
            beside[at, rows, tail] = given[:, front + packed :]
            beside[at, rows, tail.stop :] = 0  # an idle row takes whatever a step writes
        if kind.rebased and not kind.front:
            self._sink_keys[at, rows, : min(kind.sinks, kept)] = keys[:, : kind.sinks]
        if kind.decode == "argmin":
            assert scores is not None
            rest = slice(kind.packed, kind.packed + kept - packed)
            for mine, given in ((self._scores, scores), (self._ages, ages)):
                mine[at, rows, :packed] = given[:, :packed].to(mine.dtype)
                mine[at, rows, rest] = given[:, packed:].to(mine.dtype)
        if kind.page:
            pages = -(-kept // kind.page)
            for bounds, beyond in ((self._lowest, float("inf")), (self._highest, float("-inf"))):
                whole = F.pad(keys, (0, 0, 0, pages * kind.page - kept), value=beyond)
                whole = whole.view(len(whole), pages, kind.page, -1)
                bounds[at, rows, :pages] = whole.amin(dim=2) if beyond > 0 else whole.amax(dim=2)

    @torch.inference_mode()
    def rebase(self, rows: list[int], angles: Tensor) -> None:
        """Rotate the keys of rows back by `angles` [head_dim / 2]; sinks that are rotated on stay as they were cached.

        Packed keys are packed anew, which costs them a rounding each time.
        """
        index = torch.tensor(rows, device=self._device)
        for at in range(len(self.layers)):
            keys = self.codec.decode_keys(tuple(part[at, index] for part in self.keys), torch.float32)
            fresh = self.codec.encode_keys(rotate(self.codec.from_basis(keys), -angles).to(self.beside_keys.dtype))
            for mine, part in zip(self.keys, fresh, strict=True):
                mine[at, index] = part
            first = self.kind.front if self.kind.rebased else 0
            beside = self.beside_keys[at, index, first:].float()
            self.beside_keys[at, index, first:] = rotate(beside, -angles).to(self.beside_keys.dtype)

    # --- a decode step

    def plan(self, active: Bools, positions: Ints, ages: Ints, inv_freq: Tensor) -> Step:
        """Advance the bookkeeping of the first rows by a token and say what the step does.

        active bool [n]; positions and ages [n] of the new token as the model sees it and in its sequence.
        """
        kind, state = self.kind, self.state.first(len(active))
        over = active & (state.count >= state.limit)
        if kind.decode == "append" and over.any():
            raise RuntimeError("a slot is full and its policy does not overwrite")
        packing = self._pack(state, active, ages) if kind.tail else ()
        if kind.tail:
            in_tail = kind.front + (state.tail_start + state.waiting) % np.maximum(state.tail_limit, 1)
            entries = np.where(state.count < kind.front, state.count, in_tail)
            state.waiting[active & (state.count >= kind.front)] += 1
        elif kind.decode == "ring":
            around = np.maximum(state.limit - kind.sinks, 1)
            entries = np.where(over, kind.sinks + (state.count - state.limit) % around, state.count)
        else:
            entries = np.where(over, 0, state.count)
        before = np.minimum(state.count, state.limit)
        state.count[active] += 1
        lengths, reach, mask = self._seen(state, active)
        angles = None
        if kind.rebased and kind.sinks:
            angles = self._upload(np.where(active, positions + 1 - lengths, 0)).double()[:, None] * inv_freq
        return Step(
            used=len(active),
            rows=torch.arange(len(active), device=self._device),
            entries=self._upload(np.where(active, entries, 0)),
            full=self._upload(over) if kind.decode == "argmin" and not kind.tail and over.any() else None,
            reach=reach,
            mask=mask,
            lengths=self._upload(lengths),
            ages=self._upload(ages),
            in_use=self._upload(before),
            oldest=self._upload(ages - state.recent),
            angles=angles,
            pages=self._upload(np.maximum(state.pages, 1)),
            most_pages=int(state.pages.max(initial=1)),
            packing=packing,
        )

    def _pack(self, state: RowState, active: Bools, ages: Ints) -> tuple[Packing, ...]:
        """Rows whose tail is full: make room in it."""
        due = np.flatnonzero(active & (state.waiting >= state.tail_limit))
        if not len(due):
            return ()
        waiting = (state.tail_start[due, None] + np.arange(KIVI_GROUP)) % state.tail_limit[due, None]
        state.tail_start[due] = (state.tail_start[due] + KIVI_GROUP) % state.tail_limit[due]
        state.waiting[due] -= KIVI_GROUP
        room = state.packed[due] < state.packed_limit[due]
        groups = np.where(room, state.packed[due], state.cursor[due]) // KIVI_GROUP
        state.packed[due[room]] += KIVI_GROUP
        packings = []
        rings = np.ones_like(room) if self.kind.decode == "ring" else room
        for these, direct in ((rings, True), (~rings, False)):
            if these.any():
                rows = due[these]
                packings.append(
                    Packing(
                        self._upload(rows),
                        self._upload(waiting[these]),
                        self._upload(groups[these]) if direct else None,
                        self._upload(state.packed[rows]),
                        self._upload(ages[rows] - state.recent[rows]),
                    )
                )
        turned = due[~room]
        state.cursor[turned] = (state.cursor[turned] + KIVI_GROUP) % np.maximum(state.packed_limit[turned], 1)
        return tuple(packings)

    def _seen(self, state: RowState, active: Bools) -> tuple[Ints, int, Tensor | None]:
        """Entries in use [n], how far the packed ones reach, and the mask; an idle row, which nobody reads, has one."""
        kind = self.kind
        if not kind.tail:
            lengths = np.where(active, np.minimum(state.count, state.limit), 1)
            reach = int(lengths.max())
            if reach == lengths.min():
                return lengths, reach, None
            return lengths, reach, torch.arange(reach, device=self._device) < self._upload(lengths)[:, None]
        front = np.where(active, np.minimum(state.count, kind.front), 0)
        lengths = np.where(active, state.packed + front + state.waiting, 1)
        reach = int(state.packed.max())
        tail = np.arange(kind.tail)
        since = (tail - state.tail_start[:, None]) % np.maximum(state.tail_limit[:, None], 1)
        parts = [
            np.arange(reach) < state.packed[:, None],
            np.arange(kind.front) < front[:, None],
            ((tail < state.tail_limit[:, None]) & (since < state.waiting[:, None])) | ~active[:, None],
        ]
        return lengths, reach, self._upload(np.concatenate(parts, axis=1))

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def attend(self, layer: int, step: Step, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Put the new token of each row in and attend: q [n, group, d], k and v [n, d]; returns the shape of q."""
        at, n = layer - self.layers[0], step.used
        for packing in step.packing:
            self._pack_group(at, packing)
        entries = self._write(at, step, key, value)
        kind, groups = self.kind, step.reach // self.codec.group
        keys, values = (tuple(part[at, :n, :groups] for part in parts) for parts in (self.keys, self.values))
        if kind.page:
            self._widen_page(at, step, key)
            whole = self.keys[0][at, :n], self.values[0][at, :n], self._lowest[at, :n], self._highest[at, :n]
            return attend_pages(query, *whole, step.lengths, step.pages, step.most_pages, scale)
        if kind.storage == "model" and kind.decode != "argmin":
            return attend_rows(query, keys[0], values[0], step.mask, scale)
        beside = (self.beside_keys[at, :n], self.beside_values[at, :n]) if kind.front + kind.tail else None
        if beside and step.angles is not None:
            sinks = rotate(beside[0][:, : kind.front], step.angles[:, None])
            beside = torch.cat([sinks, beside[0][:, kind.front :]], dim=1), beside[1]
        out, shares = attend_packed(query, self.codec, keys, values, beside, step.mask, scale)
        if kind.decode == "argmin":
            received, scores = shares.sum(dim=1), self._scores[at, :n]
            scores[step.rows, entries] = 0.0
            for mine, fresh in (
                (scores[:, : step.reach], received[:, : step.reach]),
                (scores[:, kind.packed :], received[:, step.reach :]),
            ):
                mine.copy_(fresh) if kind.replaces else mine.add_(fresh)
            self._ages[at, step.rows, entries] = step.ages.to(torch.int32)
        return out

    def _write(self, at: int, step: Step, key: Tensor, value: Tensor) -> Tensor:
        """Write the new token of every row; returns the entries [n] that hold it."""
        kind, entries = self.kind, step.entries
        if kind.tail:
            self.beside_keys[at, step.rows, entries] = key
            self.beside_values[at, step.rows, entries] = value
            return kind.packed + entries
        if step.full is not None:
            entries = torch.where(step.full, self._least(at, step, 1)[:, 0], entries)
        index = (at, step.rows, entries)
        _put(self.keys, index, tuple(part[:, 0] for part in self.codec.encode_keys(key[:, None])))
        _put(self.values, index, tuple(part[:, 0] for part in self.codec.encode_values(value[:, None])))
        if step.angles is not None:
            early, first = (entries < kind.sinks)[:, None], entries.clamp(max=kind.sinks - 1)
            self._sink_keys[at, step.rows, first] = torch.where(early, key, self._sink_keys[at, step.rows, first])
            sinks = rotate(self._sink_keys[at, : step.used], step.angles[:, None])
            _put(self.keys, (at, slice(0, step.used), slice(0, kind.sinks)), self.codec.encode_keys(sinks))
        return entries

    def _least(self, at: int, of: Step | Packing, count: int) -> Tensor:
        """The `count` packed entries of each row with the lowest scores, [n, count], recent ones only if need be."""
        scores, ages = (tensor[at, of.rows, : self.kind.packed] for tensor in (self._scores, self._ages))
        used = torch.arange(self.kind.packed, device=self._device) < of.in_use[:, None]
        scores = torch.where(ages > of.oldest[:, None], scores + RECENT, scores)
        scores = scores.masked_fill(~used, float("inf"))
        if count > 1:
            return scores.argsort(dim=-1, stable=True)[:, :count]
        least = scores.amin(dim=-1, keepdim=True)  # the oldest of equals goes
        return ages.masked_fill(scores > least, torch.iinfo(ages.dtype).max).argmin(dim=-1, keepdim=True)

    def _pack_group(self, at: int, packing: Packing) -> None:
        """Pack waiting entries of some rows."""
        rows, front = packing.rows[:, None], self.kind.front
        keys, values = (beside[at, rows, front + packing.waiting] for beside in (self.beside_keys, self.beside_values))
        if packing.groups is not None:
            entries = packing.groups[:, None] * KIVI_GROUP + torch.arange(KIVI_GROUP, device=self._device)
            index = (at, packing.rows, packing.groups)
            _put(self.keys, index, tuple(part[:, 0] for part in self.codec.encode_keys(keys)))
            _put(self.values, index, tuple(part[:, 0] for part in self.codec.encode_values(values)))
        else:
            # Groups that receive an entry are packed anew; the others come out as they were.
            entries = self._least(at, packing, KIVI_GROUP)
            old = self.codec.decode_keys(tuple(part[at, packing.rows] for part in self.keys), torch.float32)
            _put(self.keys, (at, packing.rows), self.codec.encode_keys(_replaced(old, entries, keys)))
            old = self.codec.decode_values(tuple(part[at, packing.rows] for part in self.values), torch.float32)
            _put(self.values, (at, packing.rows), self.codec.encode_values(_replaced(old, entries, values)))
        if self.kind.decode == "argmin":
            for mine in (self._scores, self._ages):
                mine[at, rows, entries] = mine[at, rows, self.kind.packed + packing.waiting]

    def _widen_page(self, at: int, step: Step, key: Tensor) -> None:
        """Take the new keys into the bounds of their pages."""
        page, fresh = step.entries // self.kind.page, (step.entries % self.kind.page == 0)[:, None]
        for bounds, wider in ((self._lowest, torch.minimum), (self._highest, torch.maximum)):
            old = bounds[at, step.rows, page]
            bounds[at, step.rows, page] = torch.where(fresh, key, wider(old, key))


def _put(parts: Parts, index: tuple[Any, ...], fresh: Parts) -> None:
    for part, new in zip(parts, fresh, strict=True):
        part[index] = new


def _replaced(old: Tensor, entries: Tensor, new: Tensor) -> Tensor:
    """old [m, n, d] with `entries` [m, k] of each row replaced by new [m, k, d]."""
    return old.scatter(1, entries[..., None].expand(-1, -1, old.shape[-1]), new.to(old.dtype))

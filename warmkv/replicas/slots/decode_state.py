"""One decode step over many slots: all rows advance together, and every layer attends slab by slab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax
from warmkv.replicas.slots.attention_metadata import AttentionMetadata, RowMetadata
from warmkv.replicas.slots.rows import Bools, advance, take_pending_packs
from warmkv.replicas.slots.slabs import Slab
from warmkv.replicas.slots.slot import Slot
from warmkv.replicas.slots.slots import SlotPool


@dataclass(frozen=True, slots=True)
class _Part:
    """What one slab does in a step."""

    slab: Slab
    step: AttentionMetadata
    whole: bool  # whether its rows are just those of the batch, in order
    others: Tensor | None  # rows in use that are not in the batch; None if there are none

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend by `Slab.attend`, leaving the other rows as they were."""
        if self.others is None:
            return self.slab.attend(layer, self.step, query, key, value, softmax)
        with self.slab.unchanged(layer, self.others):
            return self.slab.attend(layer, self.step, query, key, value, softmax)


class DecodeState:
    """One decode step over `slots`, in their order in the batch.

    If planning it raises, nothing has changed. If the model does, `part` goes on with the same step for some of its
    slots: rows have advanced once, and no layer does again what it has done (`attention_metadata.Progress`).
    """

    def __init__(self, pool: SlotPool, slots: Sequence[Slot], inv_freq: Tensor) -> None:
        self._pool, self._inv_freq = pool, inv_freq
        self._tokens = {slot: slot.tokens for slot in slots}
        state = pool.rows
        before = state.advanced()
        try:
            _, active = self._in_batch(slots)
            self._dues = [
                take_pending_packs(slab.state, active[span], slab.kind.group) if slab.kind.grouped else []
                for slab, span in self._spans()
            ]
            self._done = advance(state, active)
            self._plan(slots, {})
        except BaseException:
            state.restore(before)
            raise
        for slot in slots:
            slot.tokens += 1

    def part(self, slots: Sequence[Slot]) -> DecodeState:
        """Return the same step for some of its slots, after it failed; if this fails, too, it has parts likewise."""
        rest = object.__new__(DecodeState)
        rest._pool, rest._inv_freq = self._pool, self._inv_freq
        rest._tokens, rest._dues, rest._done = self._tokens, self._dues, self._done
        rest._plan(slots, {part.slab: part.step for parts in self._parts.values() for part in parts})
        return rest

    def _in_batch(self, slots: Sequence[Slot]) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Bools]:
        """Return the place in the batch of every row's slot, -1 if it is not there; and whether it is."""
        batch = np.full(max(self._pool.slots, default=0) + 2, -1, dtype=np.int64)  # by slot id; FREE: none
        batch[[slot.id for slot in slots]] = np.arange(len(slots))
        at = batch[self._pool.rows.owner]
        return at, at >= 0

    def _spans(self) -> list[tuple[Slab, slice]]:
        """Return all slabs and their rows among those of the pool."""
        slabs = self._pool.slabs
        ends = np.cumsum([slab.rows for slab in slabs]).tolist()
        return [(slab, slice(end - slab.rows, end)) for slab, end in zip(slabs, ends, strict=True)]

    def _plan(self, slots: Sequence[Slot], failed: Mapping[Slab, AttentionMetadata]) -> None:
        """Lay out what every slab does for these slots, whose rows have advanced; `failed` are steps to go on with."""
        pool, done = self._pool, self._done
        state = pool.rows
        at, active = self._in_batch(slots)
        # Positions that the model sees [batch].
        self.positions = [self._tokens[slot] - slot.shift for slot in slots]
        self.slots, self._rows = list(slots), len(slots) * pool.shape.kv_heads
        self._parts: dict[int, list[_Part]] = {layer: [] for layer in range(pool.shape.layers)}
        ages = np.array([self._tokens[slot] for slot in slots], dtype=np.int64)[at]
        shifts = np.array([slot.shift for slot in slots], dtype=np.int64)[at]
        index = at * pool.shape.kv_heads + state.head
        lengths = np.where(active, done.lengths, 1)
        host = RowMetadata(
            entries=np.where(active, done.entries, 0),
            lengths=lengths,
            before=done.before,
            packed=np.where(state.grouped > 0, state.packed, lengths),
            ages=ages,
            oldest=ages - state.recent,
            early=state.protected,
            rerotated=np.where(active, ages - shifts + 1 - lengths, 0),
            reads=np.maximum(state.reads, 1),
            channels=np.maximum(state.channels, 1),
            source=np.where(active, index, 0),
            target=np.where(active, index, self._rows),
        )
        device = self._inv_freq.device
        numbers = torch.from_numpy(np.stack(host)).to(device, non_blocking=True)
        sit_out = (state.count > 0) & ~active
        for (slab, span), due in zip(self._spans(), self._dues, strict=True):
            used = np.flatnonzero(active[span])
            if not len(used):
                continue
            of = slice(span.start, span.start + int(used[-1]) + 1)
            step = slab.plan(
                RowMetadata(*(column[of] for column in host)),
                RowMetadata(*numbers[:, of].unbind()),
                active[of],
                (active & done.full)[of],
                [mine for mine in (each.of(active[span]) for each in due) if len(mine.rows)],
                self._inv_freq,
            )
            if slab in failed:
                step.take(failed[slab])
            others = np.flatnonzero(sit_out[of])
            part = _Part(
                slab,
                step,
                whole=step.used == self._rows and bool((host.target[of] == np.arange(self._rows)).all()),
                others=torch.from_numpy(others).to(device) if len(others) else None,
            )
            for layer in slab.layers:
                self._parts[layer].append(part)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend q [batch, q_heads, 1, head_dim] to k and v [batch, kv_heads, 1, head_dim]; returns the shape of q."""
        head_dim = query.shape[-1]
        queries = query.reshape(self._rows, -1, head_dim)  # query heads of a group are neighbours
        keys, values = key.reshape(self._rows, head_dim), value.reshape(self._rows, head_dim)
        if (sinks := softmax.sinks) is not None:  # of the query heads of every row
            softmax = replace(softmax, sinks=sinks.view(-1, queries.shape[1]).repeat(len(query), 1))
        out: Tensor | None = None
        for part in self._parts[layer]:
            if part.whole:
                return part.attend(layer, queries, keys, values, softmax).view_as(query)
            if out is None:
                out = queries.new_empty(self._rows + 1, *queries.shape[1:])
            source, target = part.step.numbers.source, part.step.numbers.target
            own = softmax if softmax.sinks is None else replace(softmax, sinks=softmax.sinks[source])
            out[target] = part.attend(layer, queries[source], keys[source], values[source], own)
        assert out is not None
        return out[:-1].reshape(query.shape)

"""One decode step over many slots: all rows advance together; layers attend by kernels or slab by slab."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from warmkv.policies.compression import cpu_attention
from warmkv.policies.compression.softmax import Softmax
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.attention_metadata import AttentionMetadata, RowMetadata
from warmkv.replicas.slots.kernels import LaunchProgress
from warmkv.replicas.slots.paged import PagedSlab
from warmkv.replicas.slots.plain_rows import PlainRows, SlabRows
from warmkv.replicas.slots.row_tables import RowBatch, padded_batch
from warmkv.replicas.slots.rows import Bools, Ints, advance, take_pending_packs
from warmkv.replicas.slots.slabs import Slab
from warmkv.replicas.slots.slot import Slot
from warmkv.replicas.slots.slots import SlotPool


@dataclass(frozen=True, slots=True)
class _SlabStep:
    """Hold one slab's part of a step."""

    slab: Slab
    step: AttentionMetadata
    whole: bool  # whether its rows are just those of the batch, in order
    others: Tensor | None  # rows in use that are not in the batch; None if there are none

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend by `Slab.attend`, leaving the other rows as they were."""
        if self.others is None:
            return self.slab.attend(layer, self.step, query, key, value, softmax)
        with self.slab.memory.unchanged(layer - self.slab.layers[0], self.others):
            return self.slab.attend(layer, self.step, query, key, value, softmax)


class DecodeState:
    """One decode step over `slots`, in their order in the batch.

    Nothing has changed if planning raises. If the model does, `subset` continues the same step for some of the slots:
    rows advance once, and no layer repeats what it has done (`attention_metadata.Progress`).
    """

    def __init__(self, pool: SlotPool, slots: Sequence[Slot], inv_freq: Tensor) -> None:
        self._pool, self._inv_freq = pool, inv_freq
        self._tokens = {slot: slot.tokens for slot in slots}
        self._packed: dict[tuple[int, int], set[int]] = {}  # layers in which groups have left their tails
        self._launched: dict[tuple[int, str, int], LaunchProgress] = {}  # by layer, storage, and slot if it has its own
        self._complete = False  # whether all launches were made
        state = pool.rows
        before = state.advanced()
        try:
            self._spans = _spans(pool.slabs)
            _, active = self._in_batch(slots)
            self._dues = [
                take_pending_packs(slab.state, active[span], slab.kind.group) if slab.kind.grouped else []
                for slab, span in self._spans
            ]
            self._done = advance(state, active)
            for slab, span in self._spans:
                slab.make_room(self._done.entries[span], active[span])
            self._plan(slots, {})
        except BaseException:
            state.restore(before)
            raise
        for slot in slots:
            slot.tokens += 1

    def subset(self, slots: Sequence[Slot]) -> DecodeState:
        """Return the failed step for some of its slots; it may fail and be subset again."""
        rest = object.__new__(DecodeState)
        rest._pool, rest._inv_freq = self._pool, self._inv_freq
        rest._spans = _spans(self._pool.slabs)
        rest._tokens, rest._dues, rest._done = self._tokens, self._dues, self._done
        rest._packed = {group: set(layers) for group, layers in self._packed.items()}
        rest._launched = {launch: replace(progress) for launch, progress in self._launched.items()}
        rest._complete = self._complete
        rest._plan(slots, {each.slab: each.step for layer in self._slab_steps.values() for each in layer})
        return rest

    def _in_batch(self, slots: Sequence[Slot]) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Bools]:
        """Return the batch index of every row's slot, -1 if it is not in the batch, and a mask of those that are."""
        batch = np.full(max(self._pool.slots, default=0) + 2, -1, dtype=np.int64)  # by slot id; FREE: none
        batch[[slot.id for slot in slots]] = np.arange(len(slots))
        at = batch[self._pool.rows.owner]
        return at, at >= 0

    def _plan(self, slots: Sequence[Slot], failed: Mapping[Slab, AttentionMetadata]) -> None:
        """Plan the step of slots whose rows have advanced; `failed` are metadata of a step to continue."""
        pool = self._pool
        at, active = self._in_batch(slots)
        # Positions that the model sees [batch].
        self.positions = [self._tokens[slot] - slot.shift for slot in slots]
        self.slots, self._rows = list(slots), len(slots) * pool.shape.kv_heads
        self.padded = len(slots)
        ages = np.array([self._tokens[slot] for slot in slots], dtype=np.int64)[at]
        shifts = np.array([slot.shift for slot in slots], dtype=np.int64)[at]
        self._packing = [
            (slab, mine, ages[span], (slab_number, number))
            for slab_number, ((slab, span), dues) in enumerate(zip(self._spans, self._dues, strict=True))
            for number, mine in enumerate(each.of(active[span]) for each in dues)
            if len(mine.rows)
        ]
        self._tables = pool.tables(self._inv_freq)
        self.batches: list[list[RowBatch]] = [[] for _ in range(pool.shape.layers)]
        in_slabs = any(not slab.is_fused and active[span].any() for slab, span in self._spans)
        if any(slab.is_fused for slab in pool.slabs):
            if not in_slabs and not pool.batch_invariant:
                self.padded = padded_batch(len(slots))
            self.batches = self._tables.batches(slots, pool.slabs, pool.rows, at, self.padded)
        if any(self.batches):
            pages = np.zeros((2, len(active)), dtype=np.int64)
            for slab, span in self._spans:
                if isinstance(slab, PagedSlab):
                    pages[:, span] = slab.written(self._done.entries[span])
            self._tables.take(pool.rows, self._done, active, ages, shifts, pages)
        self._slab_steps: dict[int, list[_SlabStep]] = {layer: [] for layer in range(pool.shape.layers)}
        self._plain: dict[int, PlainRows] = {}  # of slabs of the layers, those that one call may attend
        if in_slabs:
            self._plan_slabs(at, active, ages, shifts, failed)

    def _plan_slabs(
        self, at: Ints, active: Bools, ages: Ints, shifts: Ints, failed: Mapping[Slab, AttentionMetadata]
    ) -> None:
        """Plan the rows that kernels do not support."""
        state, done = self._pool.rows, self._done
        index = at * self._pool.shape.kv_heads + state.head
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
            read_limit=np.maximum(state.read_limit, 1),
            channels=np.maximum(state.channels, 1),
            source=np.where(active, index, 0),
            target=np.where(active, index, self._rows),
        )
        device = self._inv_freq.device
        plain: dict[int, list[SlabRows]] = {}  # by layer
        numbers = torch.from_numpy(np.stack(host)).to(device, non_blocking=True)
        sit_out = (state.count > 0) & ~active
        for slab, span in self._spans:
            used = np.flatnonzero(active[span])
            if slab.is_fused or not len(used):
                continue
            of = slice(span.start, span.start + int(used[-1]) + 1)
            step = slab.plan(
                RowMetadata(*(column[of] for column in host)),
                RowMetadata(*numbers[:, of].unbind()),
                active[of],
                (active & done.full)[of],
                self._inv_freq,
                alone=self._pool.batch_invariant,
            )
            if slab in failed:
                step.take(failed[slab])
            others = np.flatnonzero(sit_out[of])
            slab_step = _SlabStep(
                slab,
                step,
                whole=step.used == self._rows and bool((host.target[of] == np.arange(self._rows)).all()),
                others=torch.from_numpy(others).to(device) if len(others) else None,
            )
            for layer in slab.layers:
                self._slab_steps[layer].append(slab_step)
            if cpu_attention.is_loaded() and slab.is_plain and not self._pool.batch_invariant:
                rows = used + span.start
                own = SlabRows(slab, used, host.entries[rows], host.lengths[rows], index[rows])
                for layer in slab.layers:
                    plain.setdefault(layer, []).append(own)
        made: dict[tuple[int, ...], PlainRows] = {}  # layers have mostly the same rows
        for layer, parts in plain.items():
            name = tuple(map(id, parts))
            if name not in made:
                made[name] = PlainRows.of(parts)
            self._plain[layer] = made[name]

    def begin(self) -> None:
        """Upload the step's inputs, and pack full groups of the tails, in all layers at once.

        `attend` does so if it was not called.
        """
        self._pool.buffer.upload()
        while self._packing:
            slab, due, ages, number = self._packing[-1]
            slab.pack(due, ages, self._packed.setdefault(number, set()))
            self._packing.pop()

    @property
    def key(self) -> Hashable | None:
        """Return the key under which the step may be recorded and replayed; None if it may not be.

        It may if it has not begun and kernels attend all of its rows.
        """
        if self._launched or self._complete or any(self._slab_steps.values()):
            return None
        return self.padded, self._tables.key, self._tables.places

    def complete(self) -> None:
        """Note that all launches of the step were made, maybe by a replay, so that a retry skips them."""
        self._complete = True

    def restart(self) -> None:
        """Reset the step: its launches were only recorded."""
        self._launched.clear()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend q [batch, q_heads, 1, head_dim] to k and v [batch, kv_heads, 1, head_dim]; returns the shape of q.

        The batch has one sequence per slot, or `padded`, of which padding gets zeros.
        """
        self.begin()
        if not (batches := self.batches[layer]):
            return self._attend_slabs(layer, query, key, value, softmax, None)
        heads = self._pool.shape.kv_heads
        out = query.new_empty(self.padded * heads + 1, query.shape[1] // heads, query.shape[-1])
        for batch in batches:
            own = -1 if batch.sequence is None else self.slots[batch.sequence].id
            done = LaunchProgress(put=self._complete, counted=self._complete)
            progress = self._launched.setdefault((layer, batch.storage.name, own), done)
            given = query[:, :, 0], key[:, :, 0], value[:, :, 0]
            kernels.attend(batch, self._tables, layer, *given, softmax, out, progress)
        if self._slab_steps[layer]:
            return self._attend_slabs(layer, query, key, value, softmax, out)
        return out[: len(query) * heads].view(query.shape)

    def _attend_slabs(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, out: Tensor | None
    ) -> Tensor:
        """Attend rows that kernels do not support, slab by slab; `out` [rows + 1, group, head_dim] has the others."""
        head_dim = query.shape[-1]
        queries = query.reshape(self._rows, -1, head_dim)  # query heads of a group are neighbours
        keys, values = key.reshape(self._rows, head_dim), value.reshape(self._rows, head_dim)
        if (sinks := softmax.sinks) is not None:  # of the query heads of every row
            softmax = replace(softmax, sinks=sinks.view(-1, queries.shape[1]).repeat(len(query), 1))
        slab_steps, plain = self._slab_steps[layer], self._plain.get(layer)
        if plain is not None and softmax.is_standard and cpu_attention.takes_rows(queries, keys, values):
            if out is None:
                out = queries.new_empty(self._rows + 1, *queries.shape[1:])
            plain.attend(layer, queries, keys, values, softmax.scale, out)
            slab_steps = [each for each in slab_steps if not each.slab.is_plain]
        for slab_step in slab_steps:
            if slab_step.whole:
                return slab_step.attend(layer, queries, keys, values, softmax).view_as(query)
            if out is None:
                out = queries.new_empty(self._rows + 1, *queries.shape[1:])
            source, target = slab_step.step.numbers.source, slab_step.step.numbers.target
            own = softmax if softmax.sinks is None else replace(softmax, sinks=softmax.sinks[source])
            out[target] = slab_step.attend(layer, queries[source], keys[source], values[source], own)
        assert out is not None
        return out[:-1].reshape(query.shape)


def _spans(slabs: Sequence[Slab]) -> list[tuple[Slab, slice]]:
    """Return each slab with the range of its rows in the pool."""
    ends = np.cumsum([slab.rows for slab in slabs]).tolist()
    return [(slab, slice(end - slab.rows, end)) for slab, end in zip(slabs, ends, strict=True)]

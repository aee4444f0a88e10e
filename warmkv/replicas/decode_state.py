"""One decode step over many slots: all rows advance together, and every layer attends slab by slab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from warmkv.replicas.rows import advance, take_due
from warmkv.replicas.slabs import Numbers, Slab, Step
from warmkv.replicas.slots import Slot, SlotPool


@dataclass(frozen=True, slots=True)
class _Part:
    """What one slab does in a step."""

    slab: Slab
    step: Step
    whole: bool  # whether its rows are just those of the batch, in order


class DecodeState:
    """One decode step over `slots`, in their order in the batch."""

    def __init__(self, pool: SlotPool, slots: Sequence[Slot], inv_freq: Tensor) -> None:
        self._rows = len(slots) * pool.shape.kv_heads
        self._parts: dict[int, list[_Part]] = {layer: [] for layer in range(pool.shape.layers)}
        state = pool.rows
        batch = np.full(max(pool.slots, default=0) + 2, -1, dtype=np.int64)  # place in the batch by slot id; FREE: none
        batch[[slot.id for slot in slots]] = np.arange(len(slots))
        at = batch[state.owner]
        active = at >= 0
        ends = np.cumsum([slab.rows for slab in pool.slabs])
        spans = [slice(end - slab.rows, end) for slab, end in zip(pool.slabs, ends.tolist(), strict=True)]
        dues = [
            take_due(slab.state, active[span]) if slab.kind.grouped else []
            for slab, span in zip(pool.slabs, spans, strict=True)
        ]
        done = advance(state, active)
        ages = np.array([slot.tokens for slot in slots], dtype=np.int64)[at]
        shifts = np.array([slot.shift for slot in slots], dtype=np.int64)[at]
        index = at * pool.shape.kv_heads + state.head
        host = Numbers(
            entries=done.entries,
            lengths=done.lengths,
            before=done.before,
            packed=np.where(state.grouped > 0, state.packed, done.lengths),
            ages=ages,
            oldest=ages - state.recent,
            turned=np.where(active, ages - shifts + 1 - done.lengths, 0),
            pages=np.maximum(state.pages, 1),
            source=np.where(active, index, 0),
            target=np.where(active, index, self._rows),
        )
        numbers = torch.from_numpy(np.stack(host)).to(inv_freq.device, non_blocking=True)
        for slab, span, due in zip(pool.slabs, spans, dues, strict=True):
            used = np.flatnonzero(active[span])
            if not len(used):
                continue
            of = slice(span.start, span.start + int(used[-1]) + 1)
            step = slab.plan(
                Numbers(*(column[of] for column in host)),
                Numbers(*numbers[:, of].unbind()),
                active[of],
                done.full[of],
                due,
                inv_freq,
            )
            whole = step.used == self._rows and bool((host.target[of] == np.arange(self._rows)).all())
            for layer in slab.layers:
                self._parts[layer].append(_Part(slab, step, whole))
        for slot in slots:
            slot.tokens += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """q [batch, q_heads, 1, head_dim], k and v [batch, kv_heads, 1, head_dim]; returns the shape of q."""
        head_dim = query.shape[-1]
        queries = query.reshape(self._rows, -1, head_dim)  # query heads of a group are neighbours
        keys, values = key.reshape(self._rows, head_dim), value.reshape(self._rows, head_dim)
        out: Tensor | None = None
        for part in self._parts[layer]:
            if part.whole:
                return part.slab.attend(layer, part.step, queries, keys, values, scale).view_as(query)
            if out is None:
                out = queries.new_empty(self._rows + 1, *queries.shape[1:])
            source, target = part.step.numbers.source, part.step.numbers.target
            picked = queries[source], keys[source], values[source]
            out[target] = part.slab.attend(layer, part.step, *picked, scale)
        assert out is not None
        return out[:-1].reshape(query.shape)

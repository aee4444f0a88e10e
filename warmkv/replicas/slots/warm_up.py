"""Compile the attention kernels before requests come, in every variant that a batch can ask for.

A variant depends on the storage, on whether rows do more than append, choose segments, and are split; and on the model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from threading import Lock

import torch
from torch import Tensor

from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.compression.softmax import Softmax
from warmkv.policy_spec import METHODS, PolicySpec
from warmkv.replicas.current_device import make_current
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.kernels import LaunchProgress
from warmkv.replicas.slots.row_tables import RowBatch
from warmkv.replicas.slots.slot import Slot, SlotRequest
from warmkv.replicas.slots.slots import SlotPool

log = logging.getLogger(__name__)
TOKENS = 160
"""Of the prompt in a slot: whole groups of entries are packed of it in every storage."""


class KernelWarmUp:
    """Launch every variant of the attention kernels once, in a pass, at the first of the layers that are alike.

    On a GPU a thread for every core does, most of whose time goes to compilers that need no interpreter.
    """

    def __init__(
        self,
        pool: SlotPool,
        inv_freq: Tensor,
        storages: Sequence[str],
        limit: int,
        goes_on: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._pool, self._inv_freq, self._limit = pool, inv_freq, limit
        self._storages, self._goes_on, self._say = storages, goes_on, say
        self._seen: set[tuple[int, bool, bool]] = set()
        self._turn = Lock()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend as `DecodeState` with rows of zeros; q [1, q_heads, 1, head_dim], whose shape is returned."""
        like = self._pool.shape.window(layer), softmax.softcap is None, softmax.sinks is None
        if like not in self._seen:
            self._seen.add(like)
            slots = list[Slot]()
            try:
                slots += self._claimed(query)
                self._launch_all(slots, layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], softmax)
            finally:
                for slot in slots:
                    self._pool.release(slot)
        return query.clone()

    def _claimed(self, like: Tensor) -> Iterator[Slot]:
        """Yield a slot of each storage, filled with zeros, as far as there is room."""
        pool, shape, device = self._pool, self._pool.shape, like.device
        for storage in self._storages:
            slot = pool.claim(SlotRequest(PolicySpec(storage=storage), TOKENS, 2), self._limit)
            if slot is None:
                log.warning("kernels of %s are compiled by the first request: there is no room for a slot", storage)
                continue
            yield slot
            zeros = like.new_zeros(shape.layers, shape.kv_heads, TOKENS, shape.head_dim)
            kept = [slot.slot_request.in_window(TOKENS, shape.window(at)) for at in range(shape.layers)]
            newest = [torch.arange(TOKENS - n, TOKENS, device=device).expand(shape.kv_heads, n) for n in kept]
            pool.fill(slot, PrefillState(zeros, zeros, q_heads=shape.q_heads), [Selection(at) for at in newest])

    def _launch_all(
        self, slots: Sequence[Slot], layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> None:
        if not slots:
            return
        state = DecodeState(self._pool, slots, self._inv_freq)
        state.begin()
        tables, windowed = self._pool.tables(self._inv_freq), self._pool.shape.window(layer) > 0
        given = [each.repeat(len(slots), 1, 1) for each in (query, key, value)]
        out = query.new_empty(state.padded, *query.shape[1:])

        @torch.inference_mode()
        def launch(variant: RowBatch, what: str) -> bool:
            with self._turn:
                if not self._goes_on():
                    return False
                self._say(f"compiling attention kernels of {what}")
            kernels.attend(variant, tables, layer, given[0], given[1], given[2], softmax, out, LaunchProgress())
            return True

        asked = []
        for batch in state.batches[layer]:
            found = list(variants(batch, windowed=windowed))
            for number, variant in enumerate(found, start=1):
                asked.append((variant, f"{batch.storage.name}, {number} of {len(found)}"))
        device = query.device
        most = (os.cpu_count() or 1) if device.type == "cuda" else 1
        with ThreadPoolExecutor(most, "kernels", make_current, (device,)) as threads:
            done = list(threads.map(launch, *zip(*asked, strict=True)))
        if not all(done):
            log.warning("the first requests compile the other kernels: engine.compile_seconds are over")


def variants(batch: RowBatch, *, windowed: bool) -> Iterator[RowBatch]:
    """Yield these rows as every kind of batch that kernels tell apart, of a layer with a window or without one."""
    storage, rows = batch.storage, torch.arange(len(batch.rows) + 1, device=batch.rows.device)
    methods = [method for method in METHODS.values() if storage.name in (method.storages or (storage.name,))]
    scores, segments = "argmin" in storage.decode_rules, any(method.reads_segments for method in methods)
    for scored, segmented, slid, splits in product({False, scores}, {False, segments}, {False, windowed}, (1, 2)):
        tasks, first_splits = rows[:-1].repeat_interleave(splits), splits * rows
        split = replace(batch, tasks=tasks, first_splits=first_splits)
        yield replace(
            split, scored=scored, segmented=segmented, windowed=slid, most_entries=1, most_read=1, most_segments=1
        )

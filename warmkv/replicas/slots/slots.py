"""Decode slots: what a request keeps while it decodes, in every layer and KV head, known in size at admission.

A slot is a row for each layer and KV head. Where all of them are alike they lie side by side in one slab that spans
all layers; where a policy gives layers or heads different budgets, each layer has slabs of its own. Where kernels
attend, rows that only append lie in pages instead (`paged.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.slot_sizes import KVShape, RowKind, packed_limit, row_bytes, slot_bytes
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.layout import Row, Wanted, alike, wanted_rows
from warmkv.replicas.slots.paged import PagedSlab, SwappedPages, can_page
from warmkv.replicas.slots.row_tables import RowTables
from warmkv.replicas.slots.rows import FREE, RowTable
from warmkv.replicas.slots.slabs import Slab
from warmkv.replicas.slots.slot import Slot, SlotPiece, SlotRequest, SwappedSlot

SLAB_SLOTS = 4
"""Slots of a kind's first slab. Each further one doubles them: a step attends slab by slab."""


class SlotPool:
    """All slabs of a replica, allocated when first needed and given back when another size needs the room.

    Pages have `page_size` tokens, as many as blocks of the prefix cache; 0 is for none.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, page_size: int = 0) -> None:
        self.shape, self._dtype, self._device = shape, dtype, device
        self.page_size = page_size if kernels.reads_pages(dtype, device) else 0
        self.slabs: list[Slab] = []
        self.slots: dict[int, Slot] = {}
        self._rows: RowTable | None = None  # of all slabs, in their order
        self._tables: RowTables | None = None

    @property
    def rows(self) -> RowTable:
        """Return the bookkeeping of all rows, slab after slab."""
        if self._rows is None:
            self._rows, parts = RowTable.join([slab.state for slab in self.slabs])
            for slab, part in zip(self.slabs, parts, strict=True):
                slab.state = part
        return self._rows

    def tables(self, inv_freq: Tensor) -> RowTables:
        """Return the tables by which kernels find rows."""
        self._tables = self._tables or RowTables(self.shape, self._device, inv_freq)
        return self._tables

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all slabs, and those set aside."""
        return sum(slab.allocated_bytes for slab in self.slabs) + sum(slot.reserved for slot in self.slots.values())

    def tensors(self) -> list[Tensor]:
        """Return everything that is held; pages that slots share occur as often as they are."""
        return [tensor for slab in self.slabs for tensor in slab.tensors()]

    def claim(self, slot_request: SlotRequest, limit: int) -> Slot | None:
        """Claim a slot for a request, or None if all slabs with it would take more than `limit` bytes.

        Where sizes follow from the prompt's content, the most that it can need is set aside until the hand-off; where
        it lies in pages, until it is released. Empty slabs of other sizes are given back before the answer is None.
        """
        slot = self._new_slot(slot_request)
        claimed = False
        try:
            claimed = self._claim(slot, limit)
        finally:
            if not claimed:
                self.release(slot)
        return slot if claimed else None

    def _new_slot(self, slot_request: SlotRequest) -> Slot:
        slot = Slot(next(number for number in itertools.count() if number not in self.slots), slot_request)
        self.slots[slot.id] = slot
        return slot

    def _claim(self, slot: Slot, limit: int) -> bool:
        slot_request = slot.slot_request
        if budgets.follows_content(slot_request.spec, slot_request.prompt_tokens):
            return self._set_aside(slot, limit)
        layers = budgets.layer_budgets(slot_request.spec, slot_request.prompt_tokens, self.shape.layers)
        rows = [
            self._row(slot_request, layer, slot_request.in_window(kept, self.shape.window(layer)))
            for layer, kept in enumerate(layers)
        ]
        if len(set(rows)) == 1:
            slot.paged = can_page(rows[0][0], self.page_size)
            return self._set_aside(slot, limit) if slot.paged else self._claim_uniform(slot, rows[0][0], limit)
        return self._claim_ragged(slot, wanted_rows([[row] * self.shape.kv_heads for row in rows]), limit)

    def _set_aside(self, slot: Slot, limit: int) -> bool:
        """Set aside the bytes that a slot may need, and claim nothing yet."""
        slot_request = slot.slot_request
        needed = slot_bytes(slot_request.spec, self.shape, slot_request.prompt_tokens, slot_request.new_tokens)
        if not self.fit(limit - needed):
            return False
        slot.reserved, slot.limit = needed, limit
        return True

    def _row(self, slot_request: SlotRequest, layer: int, kept: int) -> Row:
        return *slot_request.row(kept, self.shape.window(layer)), kept

    def _claim_uniform(self, slot: Slot, kind: RowKind, limit: int) -> bool:
        """Claim neighbouring rows for all KV heads, in a slab over all layers."""
        heads, layers = self.shape.kv_heads, range(self.shape.layers)
        of_kind = [slab for slab in self.slabs if slab.kind == kind and slab.layers == layers]
        slab, rows = next(((slab, rows) for slab in of_kind for rows in self._idle(slab)), (None, range(0)))
        if slab is not None and self.fit(limit, but=[slab]):
            self._take(slot, slab, list(rows), list(range(heads)))
            return True
        # Not even with those rows: all idle ones are given back, to find the room for one slot.
        one = row_bytes(kind, self.shape) * heads * len(layers)
        if not self.fit(limit - one):
            return False
        held = sum(slab.rows // heads for slab in of_kind)
        slots = self._growth(1, max(SLAB_SLOTS, held), one, limit)
        self._take(slot, self._allocate(kind, layers, slots * heads), list(range(heads)), list(range(heads)))
        return True

    def _growth(self, needed: int, wanted: int, each: int, limit: int) -> int:
        """Return the number to allocate of what takes `each` bytes: as many as wanted, or as many as are needed.

        More than these take at most a quarter of the room left, so one size does not starve the others.
        """
        return max(needed, min(wanted, (limit - self.allocated_bytes) // (4 * each)))

    def _claim_ragged(self, slot: Slot, wanted: Sequence[Wanted], limit: int) -> bool:
        """Claim rows of the kinds that the heads of some layers ask for, in slabs of these layers."""
        found = [self._free_rows(layers, kind)[: len(heads)] for layers, kind, heads in wanted]
        missing = sum(
            (len(heads) - len(rows)) * row_bytes(kind, self.shape) * len(layers)
            for (layers, kind, heads), rows in zip(wanted, found, strict=True)
        )
        if not self.fit(limit - missing, but=[slab for rows in found for slab, _ in rows]):
            # Not even with the idle rows that were found: all are given back, to find the room for new ones.
            found = [[] for _ in wanted]
            missing = sum(len(heads) * row_bytes(kind, self.shape) * len(layers) for layers, kind, heads in wanted)
            if not self.fit(limit - missing):
                return False
        for (layers, kind, heads), rows in zip(wanted, found, strict=True):
            if len(rows) < len(heads):
                size, lacking = row_bytes(kind, self.shape) * len(layers), len(heads) - len(rows)
                missing -= lacking * size  # the rows that are still missing after these keep their room
                held = sum(slab.rows for slab in self.slabs if slab.kind == kind and slab.layers == layers)
                count = self._growth(lacking, max(SLAB_SLOTS * len(heads), held), len(wanted) * size, limit - missing)
                fresh = self._allocate(kind, layers, count)
                rows = rows + [(fresh, row) for row in range(lacking)]
            for slab in dict.fromkeys(slab for slab, _ in rows):
                at = [i for i, (of, _) in enumerate(rows) if of is slab]
                self._take(slot, slab, [rows[i][1] for i in at], [heads[i] for i in at])
        return True

    def _free_rows(self, layers: range, kind: RowKind) -> list[tuple[Slab, int]]:
        of_kind = [slab for slab in self.slabs if slab.kind == kind and slab.layers == layers]
        if kind.alike:  # the heads of a sequence are neighbours, so that what they receive can be summed
            return [(slab, row) for slab in of_kind for rows in self._idle(slab) for row in rows]
        return [(slab, row) for slab in of_kind for row in slab.free_rows()]

    def _idle(self, slab: Slab) -> Iterator[range]:
        """Free rows for all KV heads of a sequence, side by side."""
        heads = self.shape.kv_heads
        for row in range(0, slab.rows - heads + 1, heads):
            if (slab.state.owner[row : row + heads] == FREE).all():
                yield range(row, row + heads)

    def _allocate(self, kind: RowKind, layers: range, rows: int) -> Slab:
        slab = Slab(kind, layers, rows, self.shape, self._dtype, self._device)
        self.slabs.append(slab)
        self._rows = None
        return slab

    @staticmethod
    def _take(slot: Slot, slab: Slab, rows: list[int], heads: list[int]) -> None:
        for row, head in zip(rows, heads, strict=True):
            slab.claim(row, slot.id, head)
        slot.places.append((slab, rows))

    def fit(self, limit: int, but: Sequence[Slab] = ()) -> bool:
        """Return True if all slabs take at most `limit` bytes, giving back empty ones and idle rows if need be.

        Slabs in `but` are left as they are.
        """
        if self.allocated_bytes > limit:
            self._rows = None
            self.slabs = [slab for slab in self.slabs if slab in but or not slab.is_empty]
        for slab in self.slabs:
            if self.allocated_bytes > limit and slab not in but and slab.free_rows():
                moved = slab.compact()
                for slot in self.slots.values():
                    slot.places = [
                        (of, [moved[row] for row in rows] if of is slab else rows) for of, rows in slot.places
                    ]
        return self.allocated_bytes <= limit

    def release(self, slot: Slot) -> None:
        """Free everything a slot holds; nothing happens if that was done already."""
        if self.slots.pop(slot.id, None) is None:
            return
        for slab, rows in slot.places:
            for row in rows:
                slab.release(row)
        slot.places, slot.reserved = [], 0

    def swap_out(self, slot: Slot) -> SwappedSlot:
        """Copy a slot that decodes to host memory, and free it."""
        if slot.paged:
            slab, rows = self._in_pages(slot)
            pieces = [SlotPiece(slab.layers, slab.kind, slab.state.chosen(rows), [], slab.swap_out_pages(rows[0]))]
        else:
            pieces = [SlotPiece(slab.layers, slab.kind, *slab.take_out(rows)) for slab, rows in slot.places]
        swapped = SwappedSlot(slot.slot_request, slot.tokens, slot.shift, pieces, slot.resident_bytes)
        self.release(slot)
        return swapped

    def resume(self, swapped: SwappedSlot, limit: int) -> Slot | None:
        """Swap a slot in to whatever rows are free now; None if all slabs with it would exceed `limit` bytes."""
        slot = self._new_slot(swapped.slot_request)
        resumed = False
        try:
            if (pages := swapped.pieces[0].pages) is not None:
                resumed = self._resume_in_pages(slot, swapped, pages, limit)
            elif resumed := self._claim_again(slot, swapped.pieces, limit):
                self._put_back(slot, swapped)
            slot.tokens, slot.shift = swapped.tokens, swapped.shift
        finally:
            if not resumed:
                self.release(slot)
        return slot if resumed else None

    @staticmethod
    def _put_back(slot: Slot, swapped: SwappedSlot) -> None:
        for slab, rows in slot.places:
            for piece in swapped.pieces:
                if (piece.kind, piece.layers) == (slab.kind, slab.layers):
                    heads = piece.state.head.tolist()
                    mine = [row for row in rows if slab.state.head[row] in heads]
                    if mine:  # rows of one kind and layer may come from several slabs, and return to others
                        which = [heads.index(slab.state.head[row]) for row in mine]
                        slab.put_in(mine, piece.state, piece.tensors, which)

    def _claim_again(self, slot: Slot, pieces: Sequence[SlotPiece], limit: int) -> bool:
        if len(pieces[0].layers) == self.shape.layers and len(pieces) == 1:
            return self._claim_uniform(slot, pieces[0].kind, limit)
        heads: dict[tuple[range, RowKind], list[int]] = {}
        for piece in pieces:
            heads.setdefault((piece.layers, piece.kind), []).extend(piece.state.head.tolist())
        return self._claim_ragged(slot, [(*place, sorted(of)) for place, of in heads.items()], limit)

    def rebase(self, slot: Slot, most: int, inv_freq: Tensor) -> None:
        """Keep the positions that the model sees below `most`, by turning the keys of an endless stream back.

        Only distances matter to rotary attention, and angles of far positions lose precision in float32.
        """
        if slot.tokens - slot.shift < most:
            return
        longest = max(int(slab.state.limit[rows[0]]) for slab, rows in slot.places)
        back = slot.tokens - slot.shift - longest
        for slab, rows in slot.places:
            slab.rebase(rows, back * inv_freq)
        slot.shift += back

    def fill(
        self, slot: Slot, prompt: PrefillState, selections: Sequence[Selection], stored: Sequence[Tensor] = ()
    ) -> None:
        """Hand a prompt over: each layer's rows get what was selected, and the slot decodes from now on.

        `stored` are the leading blocks of the prompt that the prefix cache holds on the device, which may be shared.
        """
        if slot.paged:
            self._fill_pages(slot, prompt, selections, stored)
            return
        slot_request = slot.slot_request
        counts = [(selection.positions >= 0).sum(dim=1).tolist() for selection in selections]
        if slot.reserved:
            asked = [[self._row(slot_request, layer, kept) for kept in heads] for layer, heads in enumerate(counts)]
            slot.reserved = 0
            same = len({kept for layer in counts for kept in layer}) == len({row for of in asked for row in of}) == 1
            if not (same and self._claim_uniform_exact(slot, asked[0][0][0])):
                claimed = self._claim_ragged(slot, wanted_rows(asked), slot.limit)
                assert claimed, "the bytes that were set aside did not suffice"
        reads = budgets.page_reads(slot_request.spec, prompt.tokens, self.shape.head_dim)
        for slab, rows in slot.places:
            window = self.shape.window(slab.layers[0])
            spec = slot_request.in_layer(window)
            for row in rows:
                kept = counts[slab.layers[0]][slab.state.head[row]]
                _, limit = slot_request.row(kept, window)
                slab.state.start(
                    row,
                    slab.kind,
                    kept=kept,
                    limit=limit,
                    packed_limit=packed_limit(spec, limit),
                    recent=budgets.recent_entries(spec, limit),
                    protected=budgets.protected_entries(spec, limit),
                    reads=reads,
                )
            for layer in slab.layers:
                for run in alike(rows, slab.state.head, counts[layer]):
                    of = slice(int(slab.state.head[run.start]), int(slab.state.head[run.start]) + run.stop - run.start)
                    kept = counts[layer][of.start]
                    selection = selections[layer]
                    positions = selection.positions[of, :kept]
                    keys, values = prompt.keys[layer, of], prompt.values[layer, of]
                    if kept < prompt.tokens:
                        index = positions[..., None].expand(-1, -1, keys.shape[-1])
                        keys, values = keys.gather(1, index), values.gather(1, index)
                    scores = None if selection.attention is None else selection.attention[of, :kept]
                    slab.fill(layer, run, keys, values, positions, scores)
        slot.tokens = prompt.tokens

    def _claim_uniform_exact(self, slot: Slot, kind: RowKind) -> bool:
        one = row_bytes(kind, self.shape) * self.shape.kv_heads * self.shape.layers
        return self._claim_uniform(slot, kind, self.allocated_bytes + one)

    # --- slots in pages

    def _take_rows(self, slot: Slot) -> tuple[PagedSlab, list[int]]:
        """Claim a paged slot's rows."""
        slab = next((slab for slab in self.slabs if isinstance(slab, PagedSlab)), None)
        if slab is None:
            slab = PagedSlab(self.shape, self.page_size, self._dtype, self._device)
            self.slabs.append(slab)
        self._rows = None
        rows = slab.take_rows(slot.id)
        slot.places.append((slab, rows))
        return slab, rows

    @staticmethod
    def _in_pages(slot: Slot) -> tuple[PagedSlab, list[int]]:
        """Return where a paged slot lies."""
        ((slab, rows),) = slot.places
        assert isinstance(slab, PagedSlab)
        return slab, rows

    def _fill_pages(
        self, slot: Slot, prompt: PrefillState, selections: Sequence[Selection], stored: Sequence[Tensor]
    ) -> None:
        slab, rows = self._take_rows(slot)
        kept = int((selections[0].positions[0] >= 0).sum())
        _, limit = slot.slot_request.row(kept, 0)
        for row in rows:
            slab.state.start(row, slab.kind, kept=kept, limit=limit, packed_limit=0, recent=0, protected=0)
        slab.hand_over(rows[0], prompt, selections, list(itertools.takewhile(slab.accepts, stored)))
        slot.tokens = prompt.tokens

    def _resume_in_pages(self, slot: Slot, swapped: SwappedSlot, pages: SwappedPages, limit: int) -> bool:
        if not self.fit(limit - swapped.slot_bytes):
            return False
        slot.reserved, slot.paged = swapped.slot_bytes, True
        slab, rows = self._take_rows(slot)
        slab.swap_in_pages(rows[0], pages, swapped.pieces[0].state)
        return True

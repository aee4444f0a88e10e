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
from warmkv.policies.slot_sizes import KVShape, RowKind, row_bytes, slot_bytes
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.apart import ApartSlab
from warmkv.replicas.slots.hand_off import hand_off, kept_by_head
from warmkv.replicas.slots.layout import Row, Wanted, wanted_rows
from warmkv.replicas.slots.paged import PagedSlab, SwappedPages, can_page, page_of
from warmkv.replicas.slots.row_tables import RowTables
from warmkv.replicas.slots.rows import FREE, RowTable
from warmkv.replicas.slots.slabs import Slab
from warmkv.replicas.slots.slot import Slot, SlotPiece, SlotRequest, SwappedSlot
from warmkv.replicas.slots.step_buffer import StepBuffer

SLAB_SLOTS = 8
"""Slots of a kind's first slab. Each further one doubles them: a step attends, or packs groups, slab by slab."""


class SlotPool:
    """Own all slabs of a replica, allocated when first needed and freed when another size needs the room.

    Pages have `page_size` tokens, as blocks of the prefix cache; 0 is for none.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, page_size: int = 0) -> None:
        self.shape, self._dtype, self._device = shape, dtype, device
        self.page_size = page_of(page_size) if kernels.supports_pages(dtype, device) else 0
        self.is_static = False  # whether steps are recorded (`RowTables`)
        self.batch_invariant = False  # whether what a sequence attends depends on nothing of others, to the last bit
        self.buffer = StepBuffer(device)
        self.slabs: list[Slab] = []
        self.slots: dict[int, Slot] = {}
        self._rows: RowTable | None = None  # of all slabs, in their order
        self._tables: RowTables | None = None
        self._released = False  # whether slabs may have become empty

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
        if self._tables is None:
            self._tables = RowTables(self.shape, self.buffer, self._device, inv_freq, self.page_size)
            self._tables.is_static, self._tables.by_sequence = self.is_static, self.batch_invariant
        return self._tables

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all slabs, and those reserved."""
        return sum(slab.allocated_bytes for slab in self.slabs) + sum(slot.reserved for slot in self.slots.values())

    @property
    def step_bytes(self) -> int:
        """Return the bytes of step inputs and workspace on the device."""
        return self.buffer.nbytes + (self._tables.workspace_bytes if self._tables is not None else 0)

    def tensors(self) -> list[Tensor]:
        """Return everything that is held; pages that slots share occur as often as they are."""
        return [tensor for slab in self.slabs for tensor in slab.tensors()]

    def claim(self, slot_request: SlotRequest, limit: int) -> Slot | None:
        """Claim a slot for a request, or None if all slabs with it would take more than `limit` bytes.

        Where sizes follow from the prompt's content, the most it can need is reserved until the hand-off; in pages,
        until the release. Empty slabs of other sizes are freed before the answer is None.
        """
        self.give_back()
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
        slot.paged = len(set(rows)) == 1 and can_page(rows[0][0], self.page_size)
        if slot.paged or kernels.supports(slot_request.spec.storage_format, self._dtype, self._device):
            return self._set_aside(slot, limit)
        return self._claim_rows(slot, wanted_rows([[row] * self.shape.kv_heads for row in rows]), limit)

    def _set_aside(self, slot: Slot, limit: int) -> bool:
        """Reserve the bytes that a slot may need, without claiming rows."""
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
        """Return how many to allocate, of `each` bytes: as many as wanted, at least those needed.

        More than these take at most a quarter of the room left, so one size does not starve the others.
        """
        return max(needed, min(wanted, (limit - self.allocated_bytes) // (4 * each)))

    def _claim_ragged(self, slot: Slot, wanted: Sequence[Wanted], limit: int) -> bool:
        """Claim rows that differ by layer or head, in slabs of their layers."""
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
        """Yield runs of free rows for all KV heads of a sequence."""
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
        """Return True if all slabs take at most `limit` bytes, freeing empty slabs and idle rows if need be.

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
        """Free everything a slot holds, once."""
        if self.slots.pop(slot.id, None) is None:
            return
        for slab, rows in slot.places:
            slab.release(rows)
            self._released |= slab.is_fused
        slot.places, slot.reserved = [], 0

    def give_back(self) -> None:
        """Free fused slabs that are empty since a slot was released; not during a step."""
        if self._released:
            self._released = False
            kept = [slab for slab in self.slabs if not (slab.is_fused and slab.allocated_bytes and slab.is_empty)]
            if len(kept) < len(self.slabs):
                self.slabs, self._rows = kept, None

    def swap_out(self, slot: Slot) -> SwappedSlot:
        """Copy a decoding slot to host memory, and free it."""
        if slot.paged:
            slab, rows = self._in_pages(slot)
            pieces = [SlotPiece(slab.layers, slab.kind, slab.state.chosen(rows), [], slab.swap_out_pages(rows[0]))]
        else:
            pieces = [SlotPiece(piece.layers, piece.kind, *piece.take_out()) for piece in slot.pieces]
        swapped = SwappedSlot(slot.slot_request, slot.tokens, slot.shift, pieces, slot.resident_bytes)
        self.release(slot)
        return swapped

    def resume(self, swapped: SwappedSlot, limit: int) -> Slot | None:
        """Swap a slot in to any free rows; None if all slabs with it would exceed `limit` bytes."""
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
        for mine in slot.pieces:
            for piece in swapped.pieces:
                if (piece.kind, piece.layers) == (mine.kind, mine.layers):
                    held, heads = piece.state.head.tolist(), mine.heads
                    at = [i for i, head in enumerate(heads) if head in held]
                    if at:  # rows of one kind and layer may come from several slabs, and return to others
                        mine.put_in(at, piece.state, piece.tensors, [held.index(heads[i]) for i in at])

    def _claim_again(self, slot: Slot, pieces: Sequence[SlotPiece], limit: int) -> bool:
        heads: dict[tuple[range, RowKind], list[int]] = {}
        for piece in pieces:
            heads.setdefault((piece.layers, piece.kind), []).extend(piece.state.head.tolist())
        return self._claim_rows(slot, [(*place, sorted(of)) for place, of in heads.items()], limit)

    def rebase(self, slot: Slot, most: int, inv_freq: Tensor) -> None:
        """Keep positions below `most`, by rotating the keys of an endless stream back.

        Rotary attention depends on distances alone, and float32 angles lose precision at far positions.
        """
        if slot.tokens - slot.shift < most:
            return
        longest = max(int(piece.state.limit[piece.rows[0]]) for piece in slot.pieces)
        back = slot.tokens - slot.shift - longest
        for piece in slot.pieces:
            piece.rebase(back * inv_freq)
        slot.shift += back

    def fill(
        self, slot: Slot, prompt: PrefillState, selections: Sequence[Selection], stored: Sequence[Tensor] = ()
    ) -> int:
        """Hand a prompt off: fill each layer's rows with the selected entries, to decode from now on.

        `stored` are the prompt's leading blocks that the prefix cache holds on the device, which may be shared. Returns
        how many tokens a head keeps on average.
        """
        if slot.paged:
            return self._fill_pages(slot, prompt, selections, stored)
        counts = kept_by_head(selections)
        if slot.reserved:
            asked = [[self._row(slot.slot_request, layer, n) for n in heads] for layer, heads in enumerate(counts)]
            self._claim_set_aside(slot, wanted_rows(asked))
        hand_off(slot, self.shape, prompt, selections, counts)
        slot.tokens = prompt.tokens
        return round(sum(map(sum, counts)) / self.shape.layers / self.shape.kv_heads)

    def _claim_set_aside(self, slot: Slot, wanted: Sequence[Wanted]) -> None:
        """Claim rows for which bytes were reserved."""
        slot.reserved = 0
        (_, kind, heads), *_ = wanted
        if self._is_uniform(wanted) and not self._is_fused(kind):
            one = row_bytes(kind, self.shape) * len(heads) * self.shape.layers
            if self._claim_uniform(slot, kind, self.allocated_bytes + one):
                return
        claimed = self._claim_rows(slot, wanted, slot.limit)
        assert claimed, "the bytes that were set aside did not suffice"

    def _claim_rows(self, slot: Slot, wanted: Sequence[Wanted], limit: int) -> bool:
        """Claim rows in shared slabs, and in memory of their own where their kind lies apart."""
        apart = [each for each in wanted if self._lies_apart(each[1])]
        needed = sum(row_bytes(kind, self.shape) * len(heads) * len(layers) for layers, kind, heads in apart)
        if not apart and self._is_uniform(wanted):
            return self._claim_uniform(slot, wanted[0][1], limit)
        shared = [each for each in wanted if not self._lies_apart(each[1])]
        if not (self._claim_ragged(slot, shared, limit - needed) if shared else self.fit(limit - needed)):
            return False
        if apart:
            slab = next((slab for slab in self.slabs if isinstance(slab, ApartSlab)), None)
            if slab is None:
                slab = ApartSlab(self.shape, self._dtype, self._device)
                self.slabs.append(slab)
            self._rows = None
            slot.places.append((slab, slab.take_rows(slot.id, apart)))
        return True

    def _is_uniform(self, wanted: Sequence[Wanted]) -> bool:
        """Return True if all layers and heads want the same."""
        layers, _, heads = wanted[0]
        return len(wanted) == 1 and (len(layers), len(heads)) == (self.shape.layers, self.shape.kv_heads)

    def _is_fused(self, kind: RowKind) -> bool:
        return kernels.supports(STORAGES[kind.storage], self._dtype, self._device)

    def _lies_apart(self, kind: RowKind) -> bool:
        """Return True if rows of a kind lie in memory of their own; groups are packed for many sequences at once."""
        return self._is_fused(kind) and not kind.grouped

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
    ) -> int:
        slab, rows = self._take_rows(slot)
        kept = kept_by_head(selections[:1])[0][0]
        _, limit = slot.slot_request.row(kept, 0)
        for row in rows:
            slab.state.start(row, slab.kind, kept=kept, limit=limit, packed_limit=0, recent=0, protected=0)
        slab.hand_off(rows[0], prompt, selections, list(itertools.takewhile(slab.accepts, stored)))
        slot.tokens = prompt.tokens
        return kept

    def _resume_in_pages(self, slot: Slot, swapped: SwappedSlot, pages: SwappedPages, limit: int) -> bool:
        if not self.fit(limit - swapped.slot_bytes):
            return False
        slot.reserved, slot.paged = swapped.slot_bytes, True
        slab, rows = self._take_rows(slot)
        slab.swap_in_pages(rows[0], pages, swapped.pieces[0].state)
        return True

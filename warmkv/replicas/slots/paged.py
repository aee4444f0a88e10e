"""Rows in pages: where kernels attend, slots that only append lie in pages, and share those of a stored prefix.

A page is a tensor of its own, laid out like a block of the prefix cache, which it may be: whoever reads a page holds
it, so it lives on when the cache evicts the block, and is free when its last reader has ended. A row writes behind the
pages that it shares, to pages of its own, which are allocated when it comes to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape, RowKind
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.attention_metadata import AttentionMetadata, RowMetadata
from warmkv.replicas.slots.rows import FREE, Bools, Ints, PendingPack, RowTable
from warmkv.replicas.slots.slabs import Slab

KIND = RowKind(capacity=0)
"""Of all rows in pages, whatever their limit: as rows of a slab they hold nothing."""
LEAST_PAGE = 16
"""Entries of a page that a tile of the kernels has at least."""
_TABLE_ROWS, _TABLE_PAGES = 64, 64  # of the first table


@dataclass(slots=True)
class Pages:
    """The pages of a slot in their order; the first `shared` are blocks of the prefix cache, which nobody writes to."""

    tensors: list[Tensor] = field(default_factory=list)  # [2, layers, kv_heads, size, head_dim] each
    shared: int = 0


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """Pages in host memory, and those of them that were shared, for as long as somebody else holds these."""

    tensors: list[Tensor]
    shared: list[weakref.ref[Tensor]]


def can_page(kind: RowKind, size: int) -> bool:
    """Return True if rows of a kind may lie in pages of `size` entries: without taking more than the kind does."""
    whole = size >= LEAST_PAGE and size & (size - 1) == 0 and kind.capacity % size == 0
    return whole and kind == RowKind(capacity=kind.capacity)


class PagedSlab(Slab):
    """All rows in pages: a slab over all layers in which every slot has neighbouring rows, one for each KV head."""

    def __init__(self, shape: KVShape, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(KIND, range(shape.layers), 0, shape, dtype, device)
        self.size, self._shape = size, shape
        self.pages: dict[int, Pages] = {}  # by the first row of their slot
        layer = shape.kv_heads * size * shape.head_dim
        starts = [[at * layer, (shape.layers + at) * layer] for at in range(shape.layers)]
        self._offsets = torch.tensor(starts, device=device)  # elements before a layer's keys, values in a page
        self._head_bytes = np.arange(shape.kv_heads) * (size * shape.head_dim * dtype.itemsize)
        self._table = torch.zeros(0, 0, dtype=torch.int64, device=device)  # addresses [rows, pages]

    @property
    def allocated_bytes(self) -> int:
        """Return 0: a slot in pages keeps its bytes set aside, for it takes them by and by."""
        return 0

    def tensors(self) -> list[Tensor]:
        return [page for pages in self.pages.values() for page in pages.tensors]

    # --- slots come and go

    def take_rows(self, owner: int) -> list[int]:
        """Claim neighbouring rows for all KV heads of a slot; the table of rows may be another one then."""
        heads = self._shape.kv_heads
        row = next((row for row in range(0, self.rows, heads) if self.state.owner[row] == FREE), self.rows)
        if row == self.rows:
            self.state = RowTable.join([self.state, RowTable.of_kind(KIND, heads)])[0]
            self.rows += heads
            self._counting = torch.arange(self.rows, device=self._device)
        for head in range(heads):
            self.claim(row + head, owner, head)
        self.pages[row] = Pages()
        return list(range(row, row + heads))

    def free_rows(self) -> list[int]:
        """Return none: they take no memory, and only `take_rows` gives them to a slot."""
        return []

    def release(self, row: int) -> None:
        self.pages.pop(row, None)
        self.state.free(row)

    @torch.inference_mode()
    def hand_over(
        self, row: int, kept: int, prompt: PrefillState, selections: Sequence[Selection], stored: Sequence[Tensor]
    ) -> None:
        """Fill a slot with what it keeps of a prompt, as many tokens in every layer and KV head.

        If these are all, `stored` blocks of its prefix are taken as they are, from the first on.
        """
        pages = self.pages[row]
        if kept == prompt.tokens:
            pages.tensors += stored[: kept // self.size]
            pages.shared = len(pages.tensors)
            positions = None
        else:
            positions = torch.stack([selection.positions[:, :kept] for selection in selections])
        for start in range(pages.shared * self.size, kept, self.size):
            stop = min(start + self.size, kept)
            page = self._allocate()
            for half, whole in zip(page, (prompt.keys, prompt.values), strict=True):
                if positions is None:
                    half[:, :, : stop - start] = whole[:, :, start:stop]
                else:
                    index = positions[:, :, start:stop, None].expand(-1, -1, -1, whole.shape[-1])
                    half[:, :, : stop - start] = whole.gather(2, index)
            pages.tensors.append(page)
        self._note(row)

    def accepts(self, block: Tensor) -> bool:
        """Return True if a stored block can be a page."""
        shape = self._shape
        size = (2, shape.layers, shape.kv_heads, self.size, shape.head_dim)
        whole = block.shape == size and block.is_contiguous() and block.data_ptr() % kernels.ALIGNED == 0
        return whole and block.dtype == self._dtype and block.device.type == self._device.type

    @torch.inference_mode()
    def _allocate(self) -> Tensor:
        shape = self._shape
        size = 2, shape.layers, shape.kv_heads, self.size, shape.head_dim
        return torch.empty(size, dtype=self._dtype, device=self._device)

    @torch.inference_mode()
    def swap_out_pages(self, row: int) -> SwappedPages:
        """Copy a slot's pages to host memory."""
        pages = self.pages[row]
        return SwappedPages(
            [page.to("cpu", copy=True) for page in pages.tensors], [*map(weakref.ref, pages.tensors[: pages.shared])]
        )

    @torch.inference_mode()
    def swap_in_pages(self, row: int, swapped: SwappedPages, state: RowTable) -> None:
        """Give claimed rows what they held; of what was shared and is held by somebody else, no second copy is made."""
        pages = self.pages[row]
        for at, copied in enumerate(swapped.tensors):
            held = swapped.shared[at]() if at < len(swapped.shared) else None
            if held is not None and pages.shared == at:
                pages.shared += 1
            else:
                held = self._allocate().copy_(copied)
            pages.tensors.append(held)
        heads = list(range(self._shape.kv_heads))
        self.state.take([row + head for head in heads], state, heads)
        self._note(row)

    # --- the table of addresses

    @torch.inference_mode()
    def _note(self, row: int, first: int = 0) -> None:
        """Enter the addresses of a slot's pages from the `first` on."""
        pages = self.pages[row].tensors
        self._reserve(row + self._shape.kv_heads, len(pages))
        addresses = np.array([page.data_ptr() for page in pages[first:]], dtype=np.int64)
        entered = torch.from_numpy(addresses + self._head_bytes[:, None])
        self._table[row : row + self._shape.kv_heads, first : len(pages)] = entered.to(self._device, non_blocking=True)

    def _reserve(self, rows: int, pages: int) -> None:
        """Let the table have so many rows and pages at least."""
        old_rows, old_pages = self._table.shape
        if rows > old_rows or pages > old_pages:
            grown = self._table.new_zeros(
                max(_TABLE_ROWS, old_rows, 2 * rows if rows > old_rows else 0),
                max(_TABLE_PAGES, old_pages, 2 * pages if pages > old_pages else 0),
            )
            grown[:old_rows, :old_pages] = self._table
            self._table = grown

    def _grow(self, entries: Ints, active: Bools) -> None:
        """Allocate the pages that the new tokens of active rows come to."""
        heads = self._shape.kv_heads
        for row in range(0, len(active), heads):
            if active[row] and entries[row] // self.size >= len(self.pages[row].tensors):
                self.pages[row].tensors.append(self._allocate())
                self._note(row, len(self.pages[row].tensors) - 1)

    # --- a decode step

    def plan(
        self,
        host: RowMetadata[Ints],
        device: RowMetadata[Tensor],
        active: Bools,
        full: Bools,
        due: Sequence[PendingPack],
        inv_freq: Tensor,
    ) -> AttentionMetadata:
        """Build the metadata of a step, as `Slab.plan`; pages for its tokens are there then."""
        self._grow(host.entries, active)
        if not active.all():  # the others see nothing and write nothing
            computed = self._upload(active)
            device = device._replace(
                packed=torch.where(computed, device.packed, 0), entries=torch.where(computed, device.entries, -1)
            )
        return AttentionMetadata(
            numbers=device,
            rows=self._counting[: len(active)],
            full=None,
            reach=int(host.packed.max()),
            bias=None,
            uncompressed_tail=None,
            angles=None,
            most_reads=0,
            packing=(),
        )

    def attend(
        self, layer: int, step: AttentionMetadata, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        """Put the new token of each row in its place and attend, as `Slab.attend`."""
        n = step.used
        table, offsets = self._table[:n, : -(-step.reach // self.size)], self._offsets[layer]
        kernels.write_pages(key, value, table, offsets, step.numbers.entries, self.size)
        return kernels.attend_in_pages(query, table, offsets, step.numbers.packed, self.size, softmax.scale)

    def unchanged(self, layer: int, others: Tensor) -> AbstractContextManager[None]:
        """Do nothing: a step does not write to rows that are not in its batch."""
        return nullcontext()

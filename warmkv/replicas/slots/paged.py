"""Keep rows in pages: where kernels attend, slots that only append lie in pages, and share those of a stored prefix.

A page is a tensor of its own, laid out like a block of the prefix cache, which it may be: whoever reads a page holds
it, so it lives on when the cache evicts the block, and is free when its last reader has ended. A row writes behind the
pages that it shares, to pages of its own, which are allocated when it comes to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.slot_sizes import KVShape, RowKind
from warmkv.replicas.slots.piece import Piece
from warmkv.replicas.slots.row_facts import PARTS, line
from warmkv.replicas.slots.rows import FREE, Bools, Ints, RowTable
from warmkv.replicas.slots.slabs import Slab

KIND = RowKind(capacity=0)
"""Of all rows in pages, whatever their limit: as rows of a slab they hold nothing."""
LEAST_PAGE = 16
"""Entries of a page that a tile of the kernels has at least."""
ALIGNED = 16
"""Bytes that addresses of pages are multiples of, which lets a GPU load so many at a time."""
_TABLE_ROWS, _TABLE_PAGES = 64, 64  # of the first table


@dataclass(slots=True)
class Pages:
    """List a slot's pages in order; the first `shared` are blocks of the prefix cache, which nobody writes to."""

    tensors: list[Tensor] = field(default_factory=list)  # [2, layers, kv_heads, size, head_dim] each
    shared: int = 0


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """Hold pages in host memory, and weak references to those that were shared."""

    tensors: list[Tensor]
    shared: list[weakref.ref[Tensor]]


def can_page(kind: RowKind, size: int) -> bool:
    """Return True if rows of a kind may lie in pages of `size` entries: without taking more than the kind does."""
    return size > 0 and kind.capacity % size == 0 and kind == RowKind(capacity=kind.capacity)


def page_of(size: int) -> int:
    """Return the entries of a page where blocks of the prefix cache have `size`; 0 if kernels read no such pages."""
    return size if size >= LEAST_PAGE and size & (size - 1) == 0 else 0


class PagedSlab(Slab):
    """Hold all rows in pages: a slab over all layers; a slot has neighbouring rows, one for each KV head."""

    def __init__(self, shape: KVShape, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(KIND, range(shape.layers), 0, shape, dtype, device)
        self.is_fused = True  # only kernels follow addresses
        self.size, self._shape = size, shape
        self.pages: dict[int, Pages] = {}  # by the first row of their slot
        head_bytes = size * shape.head_dim * dtype.itemsize
        self.layer_bytes = shape.kv_heads * head_bytes
        self._heads = np.arange(shape.kv_heads) * head_bytes
        # Addresses [2, rows, pages] of each page's keys and values in layer 0, for kernels, which enter those that rows
        # come to (`written`); and the same on the host.
        self.table = torch.zeros(2, 0, 0, dtype=torch.int64, device=device)
        self._listed: Ints = np.zeros(self.table.shape, dtype=np.int64)

    @property
    def allocated_bytes(self) -> int:
        """Return 0: a slot in pages keeps its bytes set aside, for it takes them by and by."""
        return 0

    def bytes_of(self, rows: Sequence[int]) -> int:
        return 0

    def tensors(self) -> list[Tensor]:
        return [page for pages in self.pages.values() for page in pages.tensors]

    def pieces(self, rows: Sequence[int]) -> list[Piece]:
        """Return none: what a slot has in pages is not filled row by row."""
        return []

    def facts(self) -> Ints:
        found = super().facts()
        found[line("capacity")], found[line("page_size")] = self.state.limit, self.size
        row = np.arange(self.rows)
        for part, table in zip(("keys", "values"), self.table, strict=True):
            at = PARTS.index(part)
            found[at] = table.data_ptr() + row * table.stride(0) * table.element_size()
            found[len(PARTS) + at] = self.layer_bytes
        return found

    # --- slots come and go

    def take_rows(self, owner: int) -> list[int]:
        """Claim neighbouring rows for all KV heads of a slot; the table of rows may be another one then."""
        heads = self._shape.kv_heads
        row = next((row for row in range(0, self.rows, heads) if self.state.owner[row] == FREE), self.rows)
        self._reserve(row + heads, 0)  # first, since memory may run out: steps look up all rows in the table
        if row == self.rows:
            self.state = RowTable.join([self.state, RowTable.of_kind(KIND, heads)])[0]
            self.rows += heads
        for head in range(heads):
            self.claim(row + head, owner, head)
        self.pages[row] = Pages()
        return list(range(row, row + heads))

    def free_rows(self) -> list[int]:
        """Return none: they take no memory, and only `take_rows` gives them to a slot."""
        return []

    def release(self, rows: Sequence[int]) -> None:
        """Free the rows of a slot, and its pages, of which others may hold some."""
        self.pages.pop(rows[0], None)
        self.state.free(rows)

    @torch.inference_mode()
    def hand_off(
        self, row: int, prompt: PrefillState, selections: Sequence[Selection], stored: Sequence[Tensor]
    ) -> None:
        """Fill a slot that has started with what it keeps of a prompt, as many tokens in every layer and KV head.

        If these are all, `stored` blocks of its prefix are taken as they are, from the first on.
        """
        kept = int(self.state.count[row])
        tensors: list[Tensor] = []
        positions = None
        if kept == prompt.tokens:
            tensors += stored[: kept // self.size]
        else:
            positions = torch.stack([selection.positions[:, :kept] for selection in selections])
        shared = len(tensors)
        for start in range(shared * self.size, kept, self.size):
            stop = min(start + self.size, kept)
            page = self._allocate()
            for half, whole in zip(page, (prompt.keys, prompt.values), strict=True):
                if positions is None:
                    half[:, :, : stop - start] = whole[:, :, start:stop]
                else:
                    index = positions[:, :, start:stop, None].expand(-1, -1, -1, whole.shape[-1])
                    half[:, :, : stop - start] = whole.gather(2, index)
            tensors.append(page)
        self._add(row, tensors, shared)

    def accepts(self, block: Tensor) -> bool:
        """Return True if a stored block can be a page."""
        shape = self._shape
        size = (2, shape.layers, shape.kv_heads, self.size, shape.head_dim)
        whole = block.shape == size and block.is_contiguous() and block.data_ptr() % ALIGNED == 0
        return whole and block.dtype == self.dtype and block.device.type == self._device.type

    def _allocate(self) -> Tensor:
        shape = self._shape
        size = 2, shape.layers, shape.kv_heads, self.size, shape.head_dim
        return torch.empty(size, dtype=self.dtype, device=self._device)

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
        tensors: list[Tensor] = []
        for shared in swapped.shared:
            if (held := shared()) is None:
                break
            tensors.append(held)
        count = len(tensors)
        tensors += [self._allocate().copy_(copied) for copied in swapped.tensors[count:]]
        heads = list(range(self._shape.kv_heads))
        self.state.take([row + head for head in heads], state, heads)
        self._add(row, tensors, count)

    # --- the table of addresses

    @torch.inference_mode()
    def make_room(self, entries: Ints, active: Bools) -> None:
        due = [row for row in self.pages if active[row] and entries[row] // self.size >= len(self.pages[row].tensors)]
        for row, page in [(row, self._allocate()) for row in due]:
            self._list(row, len(self.pages[row].tensors), page)
            self.pages[row].tensors.append(page)

    def written(self, entries: Ints) -> Ints:
        """Return the addresses [2, rows] of the pages that rows put new tokens at `entries` in; of idle ones any."""
        pages = np.minimum(entries // self.size, max(0, self._listed.shape[2] - 1))
        found: Ints = self._listed[:, np.arange(self.rows), pages]
        return found

    def _add(self, row: int, tensors: list[Tensor], shared: int) -> None:
        """Give a slot that has started its first pages, and the table room for as many as it may come to."""
        self._reserve(row + self._shape.kv_heads, -(-int(self.state.limit[row]) // self.size))
        for at, page in enumerate(tensors):
            self._list(row, at, page)
        mine = slice(row, row + self._shape.kv_heads), slice(0, len(tensors))
        self.table[:, *mine] = torch.from_numpy(self._listed[:, *mine]).to(self._device)
        self.pages[row] = Pages(tensors, shared)

    def _list(self, row: int, at: int, page: Tensor) -> None:
        """List the addresses of a page at its place in a slot, which is named by its first row."""
        keys = page.data_ptr() + self._heads
        rows = slice(row, row + self._shape.kv_heads)
        self._listed[0, rows, at], self._listed[1, rows, at] = keys, keys + self._shape.layers * self.layer_bytes

    def _reserve(self, rows: int, pages: int) -> None:
        """Let the table have so many rows and pages at least. Kernels must be told where it is then."""
        _, old_rows, old_pages = self.table.shape
        if rows > old_rows or pages > old_pages:
            grown = self.table.new_zeros(
                2,
                max(_TABLE_ROWS, old_rows, 2 * rows if rows > old_rows else 0),
                max(_TABLE_PAGES, old_pages, 2 * pages if pages > old_pages else 0),
            )
            grown[:, :old_rows, :old_pages] = self.table
            added = [(0, new - old) for new, old in zip(grown.shape, self.table.shape, strict=True)]
            self.table, self._listed = grown, np.pad(self._listed, added)

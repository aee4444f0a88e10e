"""Describe a decode slot: its request, its rows, and its copy in host memory while it is preempted."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from warmkv.policies import budgets, sliding
from warmkv.policies.slot_sizes import RowKind, layer_row_kind
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots.paged import SwappedPages
from warmkv.replicas.slots.piece import Piece
from warmkv.replicas.slots.rows import RowTable
from warmkv.replicas.slots.slabs import Slab


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Size a slot: its policy, the prompt's length and the tokens that may be drawn."""

    spec: PolicySpec
    prompt_tokens: int
    new_tokens: int

    def row(self, kept: int, window: int) -> tuple[RowKind, int]:
        """Return kind and limit of the row of a KV head that keeps `kept` tokens; a `window` of 0 is none."""
        return layer_row_kind(self.spec, kept, self.prompt_tokens, self.new_tokens, window)

    def in_layer(self, window: int) -> PolicySpec:
        return sliding.in_layer(self.spec, window, self.prompt_tokens, self.new_tokens)

    def in_window(self, kept: int, window: int) -> int:
        """Clip a number of prompt tokens to what a layer with a window can keep."""
        return sliding.in_window(kept, window, self.prompt_tokens, self.new_tokens)

    def is_endless(self, most: int) -> bool:
        """Return True if decoding may go on beyond `most` positions, as in a streaming cache."""
        return budgets.is_endless(self.spec, self.prompt_tokens, self.new_tokens, most)


@dataclass(slots=True, eq=False)
class Slot:
    """Hold a request's rows and reserved bytes: all of these before the hand-off, in pages until the release."""

    id: int
    slot_request: SlotRequest
    reserved: int = 0  # bytes
    paged: bool = False
    limit: int = 0  # bytes that all slabs may take once it is filled
    places: list[tuple[Slab, list[int]]] = field(default_factory=list)  # slabs and its rows in them
    tokens: int = 0  # of the sequence, what has been evicted included; 0 until its hand-off
    shift: int = 0  # by how much the model sees smaller positions (an endless stream)

    @property
    def resident_bytes(self) -> int:
        return self.reserved + sum(slab.bytes_of(rows) for slab, rows in self.places)

    @property
    def pieces(self) -> list[Piece]:
        """Return its rows by kind and layers, but for those in pages."""
        return [piece for slab, rows in self.places for piece in slab.pieces(rows)]


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Hold rows copied out of a slab."""

    layers: range
    kind: RowKind
    state: RowTable
    tensors: list[Tensor]  # in host memory
    pages: SwappedPages | None = None  # instead of them

    @property
    def host_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.pages.tensors if self.pages else self.tensors))


@dataclass(frozen=True, slots=True)
class SwappedSlot:
    """Hold a preempted slot in host memory, to be resumed in other rows."""

    slot_request: SlotRequest
    tokens: int
    shift: int
    pieces: list[SlotPiece]
    slot_bytes: int  # that it takes in slabs

    @property
    def host_bytes(self) -> int:
        return sum(piece.host_bytes for piece in self.pieces)

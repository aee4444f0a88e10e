"""The hand-off from prefill to decode: rows start, and get what was selected of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.slot_sizes import KVShape, packed_limit
from warmkv.replicas.slots.layout import alike
from warmkv.replicas.slots.piece import Piece
from warmkv.replicas.slots.slot import Slot


def hand_over(
    slot: Slot, shape: KVShape, prompt: PrefillState, selections: Sequence[Selection], counts: Sequence[Sequence[int]]
) -> None:
    """Fill the rows of a slot with selections by layer, of `counts` tokens by layer and KV head."""
    reads = budgets.page_reads(slot.slot_request.spec, prompt.tokens, shape.head_dim)
    for piece in slot.pieces:
        window = shape.window(piece.layers[0])
        spec = slot.slot_request.in_layer(window)
        for row, head in zip(piece.rows, piece.heads, strict=True):
            kept = counts[piece.layers[0]][head]
            _, limit = slot.slot_request.row(kept, window)
            piece.state.start(
                row,
                piece.kind,
                kept=kept,
                limit=limit,
                packed_limit=packed_limit(spec, limit),
                recent=budgets.recent_entries(spec, limit),
                protected=budgets.protected_entries(spec, limit),
                reads=reads,
            )
        for layer in piece.layers:
            _fill(piece, layer, prompt, selections[layer], counts[layer])


def _fill(piece: Piece, layer: int, prompt: PrefillState, selection: Selection, counts: Sequence[int]) -> None:
    of = piece.heads
    for run in alike(piece.at, of, counts):
        heads = slice(of[run.start], of[run.start] + run.stop - run.start)
        kept = counts[heads.start]
        positions = selection.positions[heads, :kept]
        keys, values = prompt.keys[layer, heads], prompt.values[layer, heads]
        if kept < prompt.tokens:
            index = positions[..., None].expand(-1, -1, keys.shape[-1])
            keys, values = keys.gather(1, index), values.gather(1, index)
        scores = None if selection.attention is None else selection.attention[heads, :kept]
        piece.fill(layer, run, keys, values, positions, scores)

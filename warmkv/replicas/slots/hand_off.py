"""Hand prompts off from prefill to decode: start rows and fill them with the selected entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.slot_sizes import KVShape, packed_limit
from warmkv.replicas.slots.layout import alike
from warmkv.replicas.slots.piece import Piece
from warmkv.replicas.slots.slot import Slot

FILLED_AT_ONCE = 1 << 24
"""Bytes of keys that are packed at a time, and as many of values: packing takes a few times as much beside them."""


def kept_by_head(selections: Sequence[Selection]) -> list[list[int]]:
    """Return the number of tokens that each layer's heads keep; syncs with the device at most once."""
    if all(selection.exact for selection in selections):
        return [[selection.positions.shape[1]] * len(selection.positions) for selection in selections]
    counted = torch.stack([(selection.positions >= 0).sum(dim=1) for selection in selections])
    counts: list[list[int]] = counted.tolist()
    return counts


def hand_off(
    slot: Slot, shape: KVShape, prompt: PrefillState, selections: Sequence[Selection], counts: Sequence[Sequence[int]]
) -> None:
    """Fill the rows of a slot with selections by layer, of `counts` tokens by layer and KV head."""
    read_limit = budgets.read_limit(slot.slot_request.spec, prompt.tokens, shape.head_dim)
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
                read_limit=read_limit,
            )
        for layers in _together(piece.layers, counts, prompt.keys[0, 0, 0].nbytes):
            _fill(piece, layers, prompt, selections[layers.start : layers.stop], counts[layers.start])


def _together(layers: range, counts: Sequence[Sequence[int]], entry_bytes: int) -> Iterator[range]:
    """Yield runs of layers that keep as many tokens, which the same launches can fill."""
    begin = layers.start
    for layer in range(layers.start + 1, layers.stop + 1):
        most = max(1, FILLED_AT_ONCE // max(1, entry_bytes * sum(counts[begin])))
        if layer == layers.stop or counts[layer] != counts[begin] or layer - begin == most:
            yield range(begin, layer)
            begin = layer


def _fill(
    piece: Piece, layers: range, prompt: PrefillState, selections: Sequence[Selection], counts: Sequence[int]
) -> None:
    """Fill rows of layers that all keep `counts` tokens by KV head."""
    of, these = piece.heads, slice(layers.start, layers.stop)
    for run in alike(piece.at, of, counts):
        heads = slice(of[run.start], of[run.start] + run.stop - run.start)
        kept = counts[heads.start]
        positions = torch.stack([each.positions[heads, :kept] for each in selections])
        keys, values = prompt.keys[these, heads], prompt.values[these, heads]
        if kept < prompt.tokens:
            index = positions[..., None].expand(-1, -1, -1, keys.shape[-1])
            keys, values = keys.gather(2, index), values.gather(2, index)
        received = [each.attention[heads, :kept] for each in selections if each.attention is not None]
        piece.fill(layers, run, keys, values, positions, torch.stack(received) if received else None)

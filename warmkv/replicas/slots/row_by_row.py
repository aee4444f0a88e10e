"""Attend the rows of a slab one by one, each with shapes that follow from it alone (`engine.batch_invariant`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax
from warmkv.replicas.slots.attention import Parts, attend_segments
from warmkv.replicas.slots.attention_metadata import AttentionMetadata

Read = Callable[[slice, int, Tensor, tuple[Tensor, Tensor] | None, Tensor | None, Softmax], tuple[Tensor, Tensor]]
"""Attend rows up to an entry: rows, reach, query, uncompressed tail, bias and softmax; returns output and shares."""


def attend(
    read: Read,
    step: AttentionMetadata,
    query: Tensor,
    uncompressed_tail: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    softmax: Softmax,
) -> tuple[Tensor, Tensor]:
    """Attend q [n, group, d] row by row; returns its shape, and shares as far as the longest row reaches.

    bias [n, reach + tail] masks more than what is behind a row's own reach; None where it does not.
    """
    assert step.alone is not None
    out, width = torch.zeros_like(query), 0 if uncompressed_tail is None else uncompressed_tail[0].shape[1]
    shares = query.new_zeros(*query.shape[:2], step.reach + width, dtype=torch.float32)
    for row, reach, _ in step.alone:
        rows = slice(row, row + 1)
        own = None if bias is None else torch.cat([bias[rows, :reach], bias[rows, step.reach :]], dim=1)
        tail = None if uncompressed_tail is None else (uncompressed_tail[0][rows], uncompressed_tail[1][rows])
        out[rows], found = read(rows, reach, query[rows], tail, own, softmax.of_row(row))
        if found.dim():
            shares[rows, :, :reach], shares[rows, :, step.reach :] = found[..., :reach], found[..., reach:]
    return out, shares


def attend_chosen(gathered: Sequence[Tensor], step: AttentionMetadata, softmax: Softmax) -> Tensor:
    """Do what `attention.attend_segments` does with the tensors that it takes, row by row."""
    assert step.alone is not None
    out = torch.zeros_like(gathered[0])
    for row, _, most in step.alone:
        query, keys, values, lowest, highest, lengths, read_limits, channels = (each[row, None] for each in gathered)
        own = softmax.of_row(row)
        out[row] = attend_segments(query, keys, values, lowest, highest, lengths, read_limits, channels, most, own)[0]
    return out


def encode(encoded: Callable[[Tensor], Parts], entries: Tensor) -> Parts:
    """Encode an entry [n, 1, d] of each row, some of which multiply."""
    parts = [encoded(entry) for entry in torch.split(entries, 1)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))

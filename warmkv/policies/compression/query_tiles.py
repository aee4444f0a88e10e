"""Queries of a prompt in tiles that begin at multiples of their size, whatever the chunks that they are computed in.

What a tile or its keys lack is padded with zeros. So a query has its place in a product, and this its shape, by its
position alone: what comes out is the same to the last bit however a prompt is cut (`engine.batch_invariant`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from warmkv.policies.compression.softmax import CausalWeights, Softmax


class Tile(NamedTuple):
    """Name positions begin..stop of a prompt, of which `first`..`last` are there."""

    begin: int
    stop: int
    first: int
    last: int

    def queries(self, query: Tensor, start: int) -> Tensor:
        """Return the tile [..., size, d] of queries [..., n, d] at start..; zeros where it has none."""
        there = query[..., self.first - start : self.last - start, :]
        return F.pad(there, (0, 0, self.first - self.begin, self.stop - self.last))

    def seen(self, keys: Tensor, first: int) -> Tensor:
        """Return keys, or values, from a position on [..., stop - first, d] of a prompt's; zeros behind the last."""
        return F.pad(keys[..., first : self.last, :], (0, 0, 0, self.stop - self.last))

    def own(self, out: Tensor) -> Tensor:
        """Return what is of the queries that are there, of all [..., size, d]."""
        return out[..., self.first - self.begin : self.last - self.begin, :]


def tiles(start: int, end: int, size: int) -> Iterator[Tile]:
    """Yield the tiles of queries at start..end."""
    for begin in range(start // size * size, end, size):
        yield Tile(begin, begin + size, max(start, begin), min(end, begin + size))


def add_column_sums(sums: Tensor, queries: Tensor, keys: Tensor, start: int, softmax: Softmax, size: int) -> None:
    """Do what `prefill_state.add_column_sums` does, one query after the other, in tiles of `size`."""
    total = sums[:, : keys.shape[1]].clone()
    for tile in tiles(start, keys.shape[1], size):
        weights = CausalWeights(tile.queries(queries, start), tile.seen(keys, 0), tile.begin, softmax)
        for piece in weights.pieces():
            begin, stop = tile.begin + piece.start, tile.begin + piece.stop
            received = weights.of(piece).sum(dim=1)
            for position in range(max(begin, tile.first), min(stop, tile.last)):
                total[:, : tile.last] += received[:, position - begin, : tile.last]
    sums[:, : keys.shape[1]] = total

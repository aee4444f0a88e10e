"""Plan the rows of a slot by layer and head, and group those that are filled together."""

from __future__ import annotations

from collections.abc import Sequence

from warmkv.policies.slot_sizes import RowKind
from warmkv.replicas.slots.rows import Ints

Row = tuple[RowKind, int, int]
"""The kind of a row, the entries that it may use, and those that it begins with."""
Wanted = tuple[range, RowKind, list[int]]
"""Layers, the kind of row that they need, and for which heads."""


def wanted_rows(rows: Sequence[Sequence[Row]]) -> list[Wanted]:
    """Return the rows that each layer's heads ask for; neighbouring layers whose heads all ask alike share a slab."""
    wanted: list[Wanted] = []
    first = 0
    for layer, asked in enumerate(rows):
        same = layer + 1 < len(rows) and rows[layer + 1] == asked and len(set(asked)) == 1
        if same:
            continue
        for kind in dict.fromkeys(kind for kind, *_ in asked):
            wanted.append(
                (range(first, layer + 1), kind, [head for head, (own, *_) in enumerate(asked) if own == kind])
            )
        first = layer + 1
    return wanted


def alike(rows: list[int], heads: Ints, kept: list[int]) -> list[slice]:
    """Group neighbouring rows of neighbouring heads that keep the same number of entries."""
    runs: list[slice] = []
    for row in rows:
        head = heads[row]
        if runs and runs[-1].stop == row and heads[row - 1] == head - 1 and kept[heads[row - 1]] == kept[head]:
            runs[-1] = slice(runs[-1].start, row + 1)
        else:
            runs.append(slice(row, row + 1))
    return runs

"""Plan the rows of a slot by layer and head, and group those that are filled together."""

from __future__ import annotations

from collections.abc import Sequence

from warmkv.policies.slot_sizes import RowKind

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


def alike(rows: Sequence[int], heads: Sequence[int], kept: Sequence[int]) -> list[slice]:
    """Group places in `rows` whose rows and heads are neighbours and keep as many entries; `kept` is by head."""
    runs: list[slice] = []
    for at, (row, head) in enumerate(zip(rows, heads, strict=True)):
        if at and rows[at - 1] == row - 1 and heads[at - 1] == head - 1 and kept[head - 1] == kept[head]:
            runs[-1] = slice(runs[-1].start, at + 1)
        else:
            runs.append(slice(at, at + 1))
    return runs

"""Facts of a row for kernels, which hold while it is not moved: the addresses of its parts, and its kind."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from warmkv.policies.slot_sizes import RowKind
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots.row_memory import RowMemory
from warmkv.replicas.slots.rows import Ints

PARTS = (
    "keys", "keys_second", "keys_third", "values", "values_second", "values_third",
    "uncompressed_keys", "uncompressed_values", "sink_keys", "scores", "ages", "lowest", "highest",
)  # fmt: skip
"""What a row holds. The table of facts begins with the address of each in the first layer of its slab, then has the
bytes to the next layer."""

VECTORS = ("keys", "values", "uncompressed_keys", "uncompressed_values", "sink_keys", "lowest", "highest")
"""Parts of which kernels load whole vectors."""

FACTS = (
    "first_layer",
    "capacity",  # packed entries that it has room for
    "front",  # entries of the front, in the model's dtype
    "uncompressed",  # of front and tail
    "sinks",
    "segment",  # entries of a segment of which only the promising are read; 0: all are read
    "window",  # newest tokens that are seen, by their ages; 0: all
    "scored",  # whether the attention received is kept
    "replaced",  # whether it is that of the last step alone
    "alike",  # whether it is summed over the KV heads of a sequence
    "aged",
    "rebased",  # whether sinks are rotated on
    "page_size",  # entries of the pages that it lies in: `keys` and `values` list their addresses; 0: in none
    "layers",  # that it has
    "storage",  # number of its format among STORAGES; -1 if no kernel attends it
)
"""What else is known of a row, behind these."""

NOT_FUSED = -1


def line(name: str) -> int:
    """Return the line of the table that a fact is in."""
    return 2 * len(PARTS) + FACTS.index(name)


def facts(kind: RowKind, layers: range, memory: RowMemory, rows: int) -> Ints:
    """Return the facts of all rows of a memory [2 * parts + facts, rows], which kernels attend."""
    parts = (
        *_three(memory.keys),
        *_three(memory.values),
        memory.uncompressed_keys,
        memory.uncompressed_values,
        memory.sink_keys,
        memory.scores,
        memory.ages,
        memory.lowest,
        memory.highest,
    )
    found = np.empty((2 * len(PARTS) + len(FACTS), rows), dtype=np.int64)
    for at, part in enumerate(parts):
        layer_bytes, row_bytes = (part.stride(dim) * part.element_size() for dim in (0, 1))
        found[at] = part.data_ptr() + np.arange(rows) * row_bytes
        found[len(PARTS) + at] = layer_bytes
    found[2 * len(PARTS) :] = np.array(
        (
            layers.start,
            kind.packed,
            kind.front,
            kind.front + kind.tail,
            kind.sinks,
            kind.segment,
            kind.window,
            kind.decode == "argmin",
            kind.replaces,
            kind.alike,
            kind.aged,
            kind.rebased,
            0,
            len(layers),
            list(STORAGES).index(kind.storage),
        )
    )[:, None]
    return found


def _three(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return three parts; the first stands in for those that are not."""
    return (*parts, *parts[:1] * 2)[:3]

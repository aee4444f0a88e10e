"""How much memory a decode slot takes. Pure: admission, the simulator and the slots themselves share it.

A slot is a row for every layer and KV head; a row holds the entries (keys and values) of one KV head. Rows of one kind
have the same capacity, storage and decode rule.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from warmkv.policies import budgets, sliding
from warmkv.policy_spec import STORAGES, DecodeRule, PolicySpec, Storage

SLACK = 32
"""Entries by which rounding to a small size class, or to a whole group of at most as many, enlarges a row."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of a model's KV cache: a token takes keys and values in every layer and KV head."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    q_heads: int = 0  # query heads, which only the workspace of a prompt knows of
    windows: tuple[int, ...] = ()  # newest tokens that each layer attends to, 0: all; () where every layer does

    def window(self, layer: int) -> int:
        """Return the newest tokens that a layer attends to, 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class RowKind:
    """What the rows of a slab have in common. Entries: the packed ones, then the front, then the tail."""

    capacity: int  # entries of a row, all parts together
    storage: Storage = "model"  # of the packed entries
    tail: int = 0  # most recent entries, in the model's dtype until a group of them is packed
    front: int = 0  # sinks of a ring that is packed in groups, in the model's dtype
    decode: DecodeRule = "append"
    replaces: bool = False  # argmin: scores are those of the last step only, not summed over all
    alike: bool = (
        False  # of `replaces`: scores are summed over the KV heads of a sequence, which all evict the same entry
    )
    sinks: int = 0  # entries that a ring never overwrites
    rebased: bool = False  # whether positions are those within the cache: sinks are rotated on
    segment: int = 0  # entries of a segment of which only the promising are read; 0 reads everything
    window: int = 0  # newest tokens of which entries are seen, by the ages kept for it; 0 sees every entry in use

    @property
    def packed(self) -> int:
        return self.capacity - self.tail - self.front

    @property
    def group(self) -> int:
        """Return the entries that are packed together."""
        return STORAGES[self.storage].group

    @property
    def aged(self) -> bool:
        """Return True if the age of every entry is kept."""
        return self.decode == "argmin" or self.window > 0

    @property
    def grouped(self) -> bool:
        """Return True if new entries wait in the tail until a whole group of them is packed."""
        return self.tail > 0


def size_class(capacity: int) -> int:
    """Return entries that a row of at least `capacity` gets: a quarter power of two, at most a quarter too large."""
    step = max(16, (1 << max(0, capacity.bit_length() - 1)) // 4)
    return -(-capacity // step) * step


def row_kind(spec: PolicySpec, prompt_tokens: int, limit: int) -> RowKind:
    """Return the kind of row for a KV head that needs at most `limit` entries."""
    spec = budgets.resolve_auto(spec, prompt_tokens)
    method = spec.method
    sinks = (spec.sinks or 0) if spec.decode == "ring" else 0
    kind = RowKind(
        capacity=size_class(limit),
        storage=spec.storage,
        decode=spec.decode,
        replaces=method.by_last_step and spec.decode == "argmin",
        alike=method.keeps_alike() and spec.decode == "argmin",
        sinks=sinks,
        rebased=method.rebased,
    )
    if segment := budgets.segment_tokens(spec, prompt_tokens):
        return replace(kind, capacity=-(-size_class(limit) // segment) * segment, segment=segment)
    if (group := spec.storage_format.group) > 1:
        packed = packed_limit(spec, limit)
        if packed == 0:  # everything it may hold is recent
            return replace(kind, storage="model", capacity=min(size_class(limit), max(limit, spec.residual)))
        packed = -(-size_class(packed) // group) * group
        tail = spec.residual + (0 if spec.decode == "append" else group - 1)
        return replace(kind, capacity=sinks + packed + tail, tail=tail, front=sinks)
    return kind


def layer_row_kind(
    spec: PolicySpec, kept: int, prompt_tokens: int, new_tokens: int, window: int
) -> tuple[RowKind, int]:
    """Return kind and limit of the row for a KV head that kept `kept` tokens in a layer with a window (0: none)."""
    limit = sliding.row_limit(spec, kept, prompt_tokens, new_tokens, window)
    kind = row_kind(sliding.in_layer(spec, window, prompt_tokens, new_tokens), prompt_tokens, limit)
    if not sliding.slides(window, prompt_tokens, new_tokens):
        return kind, limit
    without_gaps = kept >= min(prompt_tokens, window) or spec.method.recent_only
    newest_only = without_gaps and kind.decode == "ring" and not kind.grouped and limit <= window
    return kind if newest_only else replace(kind, window=window), limit


def packed_limit(spec: PolicySpec, limit: int) -> int:
    """Return entries of a grouped row that may be in use beside sinks and tail: whole groups, never above a budget."""
    group = spec.storage_format.group
    packed = max(0, limit - ((spec.sinks or 0) if spec.decode == "ring" else 0) - spec.residual)
    return -(-packed // group) * group if spec.decode == "append" else packed // group * group


def row_bytes(kind: RowKind, shape: KVShape) -> int:
    """Return bytes of a row, everything counted."""
    entry = 2 * shape.head_dim * shape.dtype_bytes
    size = kind.packed * STORAGES[kind.storage].entry_bytes(shape.head_dim, shape.dtype_bytes)
    size += (kind.tail + kind.front) * entry
    if kind.rebased and not kind.front:
        size += kind.sinks * entry / 2  # the keys of the sinks as they were cached
    if kind.decode == "argmin":
        size += kind.capacity * 4  # scores
    if kind.aged:
        size += kind.capacity * 4
    if kind.segment:
        size += kind.capacity // kind.segment * entry  # smallest and largest key of every segment
    return math.ceil(size)


def column_sum_bytes(spec: PolicySpec, shape: KVShape, prompt_tokens: int) -> int:
    """Return bytes of a token's column sums in all layers and KV heads; 0 if the policy needs none."""
    return 4 * shape.layers * shape.kv_heads if budgets.needs_column_sums(spec, prompt_tokens) else 0


def workspace_bytes(spec: PolicySpec, shape: KVShape, prompt_tokens: int, marks: int = 0) -> int:
    """Return bytes of a whole prompt while it is computed, with what its policy looks at.

    Column sums are copied for the block store at `marks` breakpoints and at the ends of two blocks.
    """
    observed = budgets.observed_queries(spec, prompt_tokens) * shape.layers * shape.q_heads * shape.head_dim
    sums = prompt_tokens * column_sum_bytes(spec, shape, prompt_tokens) * (3 + marks)
    return prompt_tokens * shape.token_bytes + observed * shape.dtype_bytes + sums


def slot_bytes(
    spec: PolicySpec, shape: KVShape, prompt_tokens: int, new_tokens: int, rows: dict[int, int] | None = None
) -> int:
    """Return bytes to set aside for a request at admission; exact unless what a head keeps follows from the content.

    `rows` keeps the bytes of rows by size class, for whoever asks often about one policy and shape.
    """
    if any(sliding.slides(window, prompt_tokens, new_tokens) for window in set(shape.windows)):
        return _sliding_bytes(spec, shape, prompt_tokens, new_tokens)
    spec = budgets.resolve_auto(spec, prompt_tokens)
    if not budgets.follows_content(spec, prompt_tokens):
        # Where entries are packed in groups or read by segments, the class alone does not tell the bytes.
        by_class = spec.storage_format.group == 1 and not budgets.segment_tokens(spec, prompt_tokens)
        rows, total = rows if rows is not None and by_class else {}, 0
        for kept, layers in budgets.layer_counts(spec, prompt_tokens, shape.layers).items():
            limit = budgets.slot_limit(spec, kept, prompt_tokens, new_tokens)
            like = size_class(limit) if by_class else limit
            if like not in rows:
                rows[like] = row_bytes(row_kind(spec, prompt_tokens, limit), shape)
            total += layers * rows[like]
        return shape.kv_heads * total
    limit = budgets.slot_capacity(spec, prompt_tokens, new_tokens)
    return shape.layers * shape.kv_heads * row_bytes(_spread(row_kind(spec, prompt_tokens, limit), limit), shape)


def _sliding_bytes(spec: PolicySpec, shape: KVShape, prompt_tokens: int, new_tokens: int) -> int:
    """Return `slot_bytes` for a model with sliding windows that leave tokens behind."""
    spec = budgets.resolve_auto(spec, prompt_tokens)
    if not budgets.follows_content(spec, prompt_tokens):
        layers = zip(budgets.layer_budgets(spec, prompt_tokens, shape.layers), shape.windows, strict=True)
        total = 0
        for (kept, window), count in Counter(layers).items():
            kept = sliding.in_window(kept, window, prompt_tokens, new_tokens)
            total += count * row_bytes(layer_row_kind(spec, kept, prompt_tokens, new_tokens, window)[0], shape)
        return shape.kv_heads * total
    limit = budgets.slot_capacity(spec, prompt_tokens, new_tokens)
    total = 0
    for window, count in Counter(shape.windows).items():
        slid = sliding.slides(window, prompt_tokens, new_tokens)
        # Layers that share a budget (cake) may spend on one what the window takes from another.
        most = (
            min(limit, window + max(SLACK, spec.storage_format.group))
            if slid and not spec.method.shares_layers
            else limit
        )
        kind = row_kind(sliding.in_layer(spec, window, prompt_tokens, new_tokens), prompt_tokens, most)
        total += count * row_bytes(replace(_spread(kind, most), window=window if slid else 0), shape)
    return shape.kv_heads * total


def _spread(kind: RowKind, limit: int) -> RowKind:
    """Return the kind of a row that needs `limit` entries on average, however the total is spread over rows.

    Rounding to size classes adds at most a quarter and a step to each of them.
    """
    return replace(kind, capacity=limit + limit // 4 + 2 * max(SLACK, kind.group) + kind.tail + kind.front)

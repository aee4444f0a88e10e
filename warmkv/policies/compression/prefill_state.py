"""A prompt on its way through the model: its keys and values, and what the rules of hand-off look at."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from warmkv.policies import budgets
from warmkv.policies.compression import cpu_attention, flash, query_tiles
from warmkv.policies.compression.query_tiles import tiles
from warmkv.policies.compression.scoring import window_attention
from warmkv.policies.compression.softmax import CausalWeights, Softmax, attend, causal
from warmkv.policies.compression.triton_support import is_available
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec

ROWS_ON_CPU = 64
"""Queries of a call of torch's kernel, which computes what a mask hides as well: fewer see fewer keys in vain."""

LEAST_BEFORE = 512
"""Keys before a chunk as of which a CPU attends to them and to the chunk apart: the kernel takes a fifth longer with a
mask."""


@dataclass(frozen=True, slots=True)
class TokenClasses:
    """What kinds of tokens a vocabulary has; each is a bool tensor [vocabulary]."""

    special: Tensor
    punctuation: Tensor
    separators: Tensor  # tokens that hold the blank line which ends a passage
    ends_line: Tensor | None = None  # tokens that end in a line break, and
    starts_line: Tensor | None = None  # tokens that begin with one: together a blank line, too


class PrefillState:
    """The whole-prompt keys and values of one request while its chunks are computed, and what was seen meanwhile.

    keys, values: [layers, kv_heads, T, head_dim], keys after rotation. `queries` [layers, q_heads, observed, head_dim]
    are those of the last `observed` tokens. `column_sums` [layers, kv_heads, T] in float32, if asked for, is the
    attention that each token received from all queries so far, summed over the query heads of its KV head. `inv_freq`
    [head_dim / 2] in radians per position is that of the rotary embedding, for rules that undo the rotation. With a
    `query_tile` so many queries are attended at a time, from multiples of it on, whatever the chunks: what one gets is
    the same to the last bit then.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        q_heads: int,
        observed: int = 0,
        column_sums: bool = False,
        inv_freq: Tensor | None = None,
        windows: Sequence[int] = (),
        token_ids: Sequence[int] = (),
        classes: TokenClasses | None = None,
        query_tile: int = 0,
    ) -> None:
        self.keys, self.values = keys, values
        self.layers, self.kv_heads, self.tokens, self.head_dim = keys.shape
        self.computed = 0  # tokens whose KV is in place
        self.chunk = range(0)  # positions that are being computed
        self._summed: set[int] = set()  # layers whose column sums have this chunk: a pass may be repeated
        self.inv_freq = inv_freq
        self._softmaxes: dict[int, Softmax] = {}  # of layers, as the model gives them
        self._query_tile = query_tile
        self._windows = windows  # newest tokens that each layer attends to, 0: all; none where all layers do
        self.first = 0  # position of the first token here; above 0 in a view of what a window shows
        self._whole_keys = keys
        self._observed = observed
        self.queries = keys.new_empty(self.layers, q_heads, observed, self.head_dim) if observed else None
        self.column_sums: Tensor | None = None
        if column_sums:
            self.column_sums = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        self._ids, self._classes = token_ids, classes
        self._members: dict[str, Tensor] = {}
        self._masks: dict[tuple[int, int], Tensor | None] = {}  # by window and first query

    @classmethod
    def allocate(
        cls,
        shape: KVShape,
        token_ids: Sequence[int],
        specs: Iterable[PolicySpec],
        *,
        dtype: torch.dtype,
        device: torch.device,
        inv_freq: Tensor,
        classes: TokenClasses | None = None,
        keys_and_values: Iterable[Tensor] | None = None,
        query_tile: int = 0,
    ) -> PrefillState:
        """Allocate the state of a prompt, with all that any of the policies observes while it is computed.

        Keys and values are taken as they are where they are given.
        """
        tokens, specs = len(token_ids), list(specs)
        if keys_and_values is None:
            keys = torch.empty((shape.layers, shape.kv_heads, tokens, shape.head_dim), dtype=dtype, device=device)
            keys_and_values = keys, torch.empty_like(keys)
        return cls(
            *keys_and_values,
            q_heads=shape.q_heads,
            observed=min(tokens, max((budgets.observed_queries(spec, tokens) for spec in specs), default=0)),
            column_sums=any(budgets.needs_column_sums(spec, tokens) for spec in specs),
            inv_freq=inv_freq,
            windows=shape.windows,
            token_ids=token_ids,
            classes=classes,
            query_tile=query_tile,
        )

    def softmax(self, layer: int) -> Softmax:
        """Return the softmax of a layer."""
        return self._softmaxes.get(layer) or Softmax(self.head_dim**-0.5, window=self.window(layer))

    def window(self, layer: int) -> int:
        """Return the newest tokens that a layer attends to, 0 for all."""
        return self._windows[layer] if self._windows else 0

    def in_window(self, layer: int) -> PrefillState:
        """Return a view of the newest tokens that a layer's window shows to the last query, or the prompt itself."""
        window = self.window(layer)
        if not 0 < window < self.tokens:
            return self
        view = copy.copy(self)
        view.first = self.tokens - window
        view.keys, view.values = self.keys[:, :, view.first :], self.values[:, :, view.first :]
        if self.column_sums is not None:
            view.column_sums = self.column_sums[..., view.first :]
        view.tokens, view._ids, view._members = window, self._ids[view.first :], {}
        return view

    def window_attention(self, layer: int, count: int) -> Iterator[Tensor]:
        """Yield attention of the last `count` queries on the tokens here: [kv_heads, group, some queries, tokens]."""
        before, keys = self._seen_by_last(layer, count)
        for rows in window_attention(keys, self.last_queries(layer, count), self.softmax(layer)):
            yield rows[..., before:]

    def window_sums(self, layer: int, count: int) -> Tensor:
        """Sum what the last `count` queries attend to the tokens here, over queries and group: [kv_heads, tokens]."""
        before, keys = self._seen_by_last(layer, count)
        sums = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
        add_column_sums(sums, self.last_queries(layer, count), keys, keys.shape[1] - count, self.softmax(layer))
        return sums[:, before:]

    def _seen_by_last(self, layer: int, count: int) -> tuple[int, Tensor]:
        """Return the keys that the last `count` queries see, and how many of these lie before the tokens here."""
        # What the earliest of the queries sees before the view has a share of its weights.
        first = max(0, self.first - count + 1) if self.window(layer) else self.first
        return self.first - first, self._whole_keys[layer, :, first:]

    def last_queries(self, layer: int, count: int) -> Tensor:
        """Return the last observed queries [q_heads, count, head_dim]."""
        assert self.queries is not None
        assert 0 < count <= self._observed
        return self.queries[layer][:, -count:]

    def members(self, kind: str) -> Tensor:
        """Return which positions hold tokens of a class ("special", "punctuation", "separators"): bool [T]."""
        if kind not in self._members:
            self._members[kind] = self._find(kind)
        return self._members[kind]

    def _find(self, kind: str) -> Tensor:
        if self._classes is None or not self._ids:
            return torch.zeros(self.tokens, dtype=torch.bool, device=self.keys.device)
        ids = torch.tensor(self._ids)
        of: Tensor = getattr(self._classes, kind)
        found = of[ids]
        ends, starts = self._classes.ends_line, self._classes.starts_line
        if kind == "separators" and ends is not None and starts is not None:
            found[:-1] |= ends[ids[:-1]] & starts[ids[1:]]
        return found.to(self.keys.device)

    def reuse(self, tokens: int, column_sums: Tensor | None = None) -> None:
        """Begin behind the first `tokens` tokens, already in place, with the column sums of their own queries."""
        self.computed = tokens
        if self.column_sums is not None and tokens:
            assert column_sums is not None
            self.column_sums[..., :tokens] = column_sums

    @property
    def is_computed(self) -> bool:
        return self.computed == self.tokens

    @property
    def ends(self) -> bool:
        """Return True if the chunk that is being computed is the last."""
        return self.chunk.stop == self.tokens

    def begin_chunk(self, tokens: int) -> None:
        """Prepare to compute the next `tokens` tokens. If that fails, it may be tried again until `end_chunk`."""
        self.chunk = range(self.computed, self.computed + tokens)
        self._masks, self._summed = {}, set()

    def end_chunk(self) -> None:
        self.computed = self.chunk.stop
        self._masks = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend q [1, q_heads, n, head_dim] to k and v [1, kv_heads, n, head_dim] of the chunk; returns the shape of
        q.
        """
        self._take(layer, query, key, value, softmax)
        return self._attend(layer, query)

    def attend_drawn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend as `attend`; returns what is drawn from, that is the last position of the last chunk, if any."""
        self._take(layer, query, key, value, softmax)
        return self._attend(layer, query[:, :, -1:]) if self.ends else query[:, :, :0]

    def _take(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> None:
        """Put keys and values of the chunk in place, and what is observed of its queries."""
        start, end = self.chunk.start, self.chunk.stop
        softmax = self._softmaxes[layer] = replace(softmax, window=self.window(layer))
        self.keys[layer, :, start:end] = key[0]
        self.values[layer, :, start:end] = value[0]
        if self.queries is not None:
            first = self.tokens - self._observed  # position of the first observed query
            if end > first:
                begin = max(start, first)
                self.queries[layer, :, begin - first : end - first] = query[0, :, begin - start :]
        if self.column_sums is not None and layer not in self._summed:
            given = self.column_sums[layer], query[0], self.keys[layer, :, :end], start, softmax
            if self._query_tile:
                query_tiles.add_column_sums(*given, self._query_tile)
            else:
                add_column_sums(*given)
            self._summed.add(layer)

    def _attend(self, layer: int, query: Tensor) -> Tensor:
        """Attend the last queries of the chunk [1, q_heads, n, head_dim] to the keys and values in place."""
        if self._query_tile:
            return self._attend_tiles(layer, query)
        end, softmax = self.chunk.stop, self._softmaxes[layer]
        start = end - query.shape[2]
        first = self._first_seen(start, softmax.window)
        keys, values = self.keys[layer, None, :, first:end], self.values[layer, None, :, first:end]
        if flash.takes(query, keys, values, softmax):
            return flash.attend(query, keys, values, softmax)
        if not softmax.is_standard:
            return attend(query[0], keys[0], values[0], start, first, softmax)[None]
        if cpu_attention.takes(query, keys, values):
            return cpu_attention.attend(query, keys, values, softmax.scale, softmax.window)
        if start >= LEAST_BEFORE and query.shape[2] > 1 and not softmax.window and query.device.type == "cpu":
            return self._attend_apart(layer, query, softmax.scale)
        rows = end - start if query.is_cuda else ROWS_ON_CPU
        pieces = []
        for begin in range(start, end, rows):
            stop = min(begin + rows, end)
            first, mask = self._first_seen(begin, softmax.window), self._mask(softmax.window, begin, stop)
            pieces.append(
                F.scaled_dot_product_attention(
                    query[:, :, begin - start : stop - start],
                    self.keys[layer, None, :, first:stop],
                    self.values[layer, None, :, first:stop],
                    attn_mask=mask,
                    is_causal=mask is None and stop - begin > 1,
                    scale=softmax.scale,
                    enable_gqa=True,
                )
            )
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _attend_tiles(self, layer: int, query: Tensor) -> Tensor:
        """Attend the last queries of the chunk in tiles (`query_tiles`)."""
        end, softmax, pieces = self.chunk.stop, self._softmaxes[layer], []
        start = end - query.shape[2]
        for tile in tiles(start, end, self._query_tile):
            first, rows = self._first_seen(tile.begin, softmax.window), tile.queries(query, start)
            keys, values = (tile.seen(each[layer, None], first) for each in (self.keys, self.values))
            if flash.takes(rows, keys, values, softmax):
                out = flash.attend(rows, keys, values, softmax)
            elif not softmax.is_standard:
                out = attend(rows[0], keys[0], values[0], tile.begin, first, softmax)[None]
            else:
                mask = self._mask(softmax.window, tile.begin, tile.stop)
                out = F.scaled_dot_product_attention(
                    rows, keys, values, attn_mask=mask, is_causal=mask is None, scale=softmax.scale, enable_gqa=True
                )
            pieces.append(tile.own(out))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _attend_apart(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attend the last queries of the chunk to what all of them see, and causally to their own keys; no mask."""
        attend_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        end, keys, values = self.chunk.stop, self.keys[layer, None], self.values[layer, None]
        start = end - query.shape[2]
        seen, log_sum = attend_cpu(query, keys[:, :, :start], values[:, :, :start], scale=scale)
        own, own_log_sum = attend_cpu(
            query, keys[:, :, start:end], values[:, :, start:end], is_causal=True, scale=scale
        )
        return torch.lerp(own, seen, (log_sum - own_log_sum).sigmoid()[..., None].to(own.dtype))

    def _first_seen(self, query: int, window: int) -> int:
        """Return the position of the earliest key that a query attends to."""
        return max(0, query + 1 - window) if window else 0

    def _mask(self, window: int, begin: int, stop: int) -> Tensor | None:
        """Return the mask of queries over the keys that they see, to be added to logits; None if one sees all, or they
        are causal from the first key on. Made once for all layers: of a bool one the kernel would make this in each.
        """
        key = window, begin
        if key not in self._masks:
            plain = stop - begin == 1 or (begin == 0 and not 0 < window < stop)
            keys = range(self._first_seen(begin, window), stop)
            seen = None if plain else causal(begin, stop - begin, keys, window, self.keys.device)
            self._masks[key] = None if seen is None else self.keys.new_zeros(()).where(seen, float("-inf"))
        return self._masks[key]


def add_column_sums(sums: Tensor, queries: Tensor, keys: Tensor, start: int, softmax: Softmax) -> None:
    """Add to `sums` [kv_heads, T] what keys [kv_heads, end, d] receive from queries [q_heads, n, d] at start..start+n.

    No matrix of T x T logits ever exists: kernels go tile by tile where they run, elsewhere queries go in pieces. If it
    raises, nothing is added.
    """
    if is_available(sums.device) and queries.dtype != torch.float64:
        from warmkv.policies.compression import column_kernels

        column_kernels.add_column_sums(sums, queries, keys, start, softmax)
        return
    weights, end = CausalWeights(queries, keys, start, softmax), keys.shape[1]
    received = sums.new_zeros(len(keys), end)
    for piece in weights.pieces():
        received += weights.of(piece).sum(dim=(1, 2))
    sums[:, :end] += received

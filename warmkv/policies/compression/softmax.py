"""The softmax of a model's attention: capped logits, learned sinks and a window are part of every weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOGITS_AT_ONCE = 1 << 22
"""Attention logits that are computed at a time: 16 MiB in float32, so that nothing needs a matrix of T x T."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """How one layer makes weights of the products of queries and keys."""

    scale: float = 1.0
    softcap: float | None = None  # logits are softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118)
    sinks: Tensor | None = None  # [..., q_heads] logits that take a share and have no value (gpt-oss, arXiv 2508.10925)
    window: int = 0  # newest keys that a query sees, its own included; 0: all

    def of_row(self, row: int) -> Softmax:
        """Return the softmax of one row of several, of which `sinks` [rows, group] has those of each."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[row, None])

    @property
    def is_standard(self) -> bool:
        """Return True if logits are not capped and there are no sinks."""
        return self.softcap is None and self.sinks is None


def causal(first: int, queries: int, keys: range, window: int, device: torch.device) -> Tensor:
    """Return which keys at positions `keys` the queries at `first`, first + 1, ... see: bool [queries, len(keys)]."""
    at = torch.arange(keys.start, keys.stop, device=device)
    reach = torch.arange(first, first + queries, device=device)[:, None]
    seen = at <= reach
    return seen & (at > reach - window) if window else seen


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Bring logits smoothly within +-softcap."""
    return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)


def weigh(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of masked logits [..., n] beside `sinks` [...], whose own share is left out: [..., n]."""
    if sinks is None:
        return logits.softmax(dim=-1)
    return torch.cat([logits, sinks[..., None].to(logits.dtype)], dim=-1).softmax(dim=-1)[..., :-1]


class CausalWeights:
    """Compute the attention weights of queries over keys, in float32, a few queries at a time.

    queries [q_heads, n, d] are those of positions start.., keys [kv_heads, m, d] of first_key.., both after rotation.
    """

    def __init__(self, queries: Tensor, keys: Tensor, start: int, softmax: Softmax, first_key: int = 0) -> None:
        kv_heads, count, head_dim = keys.shape
        # Heads of a group are neighbours. Scaled first: float16 would overflow before, bfloat16 round.
        self._queries = (queries.float() * softmax.scale).reshape(kv_heads, -1, queries.shape[1], head_dim)
        self._columns = keys.float().transpose(1, 2)
        self._sinks = None if softmax.sinks is None else softmax.sinks.float().view(kv_heads, -1, 1)
        self._start, self._keys, self._softmax = start, range(first_key, first_key + count), softmax
        self._at_once = max(1, LOGITS_AT_ONCE // (len(queries) * count))

    def pieces(self) -> Iterator[slice]:
        """Yield the queries in pieces of at most `LOGITS_AT_ONCE` logits, or of one query."""
        for first in range(0, self._queries.shape[2], self._at_once):
            yield slice(first, min(first + self._at_once, self._queries.shape[2]))

    def of(self, piece: slice) -> Tensor:
        """Return the weights of a piece, [kv_heads, group, queries, m]; `group` is the query heads of a KV head."""
        rows, softmax = self._queries[:, :, piece], self._softmax
        (kv_heads, group, count, _), sinks = rows.shape, self._sinks
        logits = cap((rows.flatten(1, 2) @ self._columns).view(kv_heads, group, count, -1), softmax.softcap)
        seen = causal(self._start + piece.start, count, self._keys, softmax.window, logits.device)
        logits.masked_fill_(~seen, float("-inf"))
        return weigh(logits, None if sinks is None else sinks.expand(-1, -1, count))


def attend(query: Tensor, keys: Tensor, values: Tensor, first: int, start: int, softmax: Softmax) -> Tensor:
    """Attend causally with capped logits or sinks, in float32, a few queries at a time.

    query [q_heads, n, d] at positions first.., keys and values [kv_heads, m, d] at start..; returns the shape of query.
    """
    weights, values, out = CausalWeights(query, keys, first, softmax, start), values.float(), torch.empty_like(query)
    for piece in weights.pieces():
        attended = weights.of(piece).flatten(1, 2) @ values
        out[:, piece] = attended.view(len(query), -1, query.shape[2]).to(out.dtype)
    return out

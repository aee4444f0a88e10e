"""Scores that several methods share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from warmkv.policies.compression.softmax import CausalWeights, Softmax

if TYPE_CHECKING:
    from warmkv.policies.compression.prefill_state import PrefillState

NONE = -1
"""Fills up the positions of a head that keeps fewer than the others."""


def window_attention(keys: Tensor, queries: Tensor, softmax: Softmax) -> Iterator[Tensor]:
    """Yield attention of the prompt's last queries, softmax in float32, causal inside the window; a few queries at a
    time.

    keys [kv_heads, T, head_dim], queries [q_heads, w, head_dim] of positions T-w..T-1, both after rotation.
    Yields [kv_heads, group, some queries, T], where `group` is the query heads of a KV head.
    """
    weights = CausalWeights(queries, keys, keys.shape[1] - queries.shape[1], softmax)
    yield from map(weights.of, weights.pieces())


def window_votes(prompt: PrefillState, layer: int, window: int) -> Tensor:
    """Sum the attention of a prompt's last `window` queries to the tokens before them: [kv_heads, T - window]."""
    return prompt.window_sums(layer, window)[:, : prompt.tokens - window]


def window_moments(prompt: PrefillState, layer: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and entropy of the attention of the last `window` queries on the tokens before them.

    Mean and variance are over these queries, float64 [kv_heads, group, T - window]; the variance is that of a sample
    (divided by one less than its size, 0 of a single query). The entropy, float64 [], is summed over queries and heads.
    """
    total = square = entropy = torch.zeros((), dtype=torch.float64, device=prompt.keys.device)
    for rows in prompt.window_attention(layer, window):
        before = rows[..., : prompt.tokens - window]
        entropy = entropy - torch.xlogy(before, before).sum(dtype=torch.float64)
        total = total + before.sum(dim=2, dtype=torch.float64)
        square = square + before.square_().sum(dim=2, dtype=torch.float64)
    mean = total / window
    variance = (square / window - mean.square()).clamp_(min=0) * (window / max(1, window - 1))
    return mean, variance, entropy


def best(scores: Tensor, count: int) -> Tensor:
    """Return positions [..., count] of the highest scores [..., n], descending; ties go to the lower position."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count]


def padded_positions(kept: Tensor) -> Tensor:
    """Return positions of a mask [kv_heads, T], ascending, as [kv_heads, n] with NONE at the ends of shorter rows."""
    counts = kept.sum(dim=1)
    longest = int(counts.max())
    order = kept.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :longest]
    return order.masked_fill(torch.arange(longest, device=kept.device) >= counts[:, None], NONE)


def pool_positions(scores: Tensor, kernel: int, pooling: Literal["avg", "max"]) -> Tensor:
    """Pool [..., n] along positions with `kernel // 2` zeros (avg) or nothing (max) on both sides; same shape."""
    flat = scores.reshape(-1, 1, scores.shape[-1])
    if pooling == "avg":
        pooled = F.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    else:
        pooled = F.max_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    return pooled.view_as(scores)

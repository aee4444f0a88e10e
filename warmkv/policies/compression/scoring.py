"""Scores that several methods share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from warmkv.policies.compression.prompt import Prompt


def window_attention(keys: Tensor, queries: Tensor, scale: float) -> Tensor:
    """Attention of the prompt's last queries, softmax in float32, causal inside the window.

    keys [kv_heads, T, head_dim], queries [q_heads, w, head_dim] of positions T-w..T-1, both after rotation.
    Returns [kv_heads, group, w, T], where `group` is the query heads of a KV head.
    """
    kv_heads, tokens, head_dim = keys.shape
    window = queries.shape[1]
    grouped = queries.reshape(kv_heads, -1, head_dim)  # heads of a group are neighbours: [kv_heads, group * w, d]
    logits = (grouped @ keys.transpose(1, 2)).float().mul_(scale).view(kv_heads, -1, window, tokens)
    row = torch.arange(window, device=keys.device)
    future = row[None, :] > row[:, None]
    logits[..., tokens - window :].masked_fill_(future, float("-inf"))
    return logits.softmax(dim=-1)


def window_rows(prompt: Prompt, layer: int, window: int) -> Tensor:
    """Attention of the last `window` queries on the tokens before them: [kv_heads, group, window, T - window]."""
    queries = prompt.last_queries(layer, window)
    return window_attention(prompt.keys[layer], queries, prompt.scale)[..., : prompt.tokens - window]


def window_votes(prompt: Prompt, layer: int, window: int) -> Tensor:
    """The same, summed over the window and over the query heads of a KV head: [kv_heads, T - window]."""
    return window_rows(prompt, layer, window).sum(dim=(1, 2))


def best(scores: Tensor, count: int) -> Tensor:
    """Positions [..., count] of the highest scores [..., n], the highest first; ties go to the lower position."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count]


def pool_positions(scores: Tensor, kernel: int, pooling: Literal["avg", "max"]) -> Tensor:
    """Pool [..., n] along positions with `kernel // 2` zeros (avg) or nothing (max) on both sides; same shape."""
    flat = scores.reshape(-1, 1, scores.shape[-1])
    if pooling == "avg":
        pooled = F.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    else:
        pooled = F.max_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    return pooled.view_as(scores)

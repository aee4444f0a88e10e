"""The one attention function of all models: it writes new keys and values into engine state and attends from there.

A transformers model calls it in every layer with q, k, v after rotation. The engine passes its state for the step as
the keyword `warmkv`, which travels through the model unchanged (reference: transformers' attention interface).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "warmkv"


class StepState(Protocol):
    """Where a step keeps its keys and values."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """q [batch, q_heads, n, head_dim], k and v [batch, kv_heads, n, head_dim]; returns the shape of q."""
        ...


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    warmkv: StepState | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if softcap is not None or s_aux is not None:
        raise ValueError("this model caps its attention logits or has learned sinks, which warmkv does not compute")
    if warmkv is None:
        raise ValueError("this model attends through warmkv: call it with the engine's state as warmkv=...")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return warmkv.attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _forward)
AttentionMaskInterface.register(ATTENTION, lambda **_: None)  # masks follow from the state, never from tensors


class PrefillState:
    """The whole-prompt keys and values of one request while its chunks are computed.

    keys, values: [layers, kv_heads, T, head_dim]. The queries of the last `observed` prompt tokens are kept per layer
    for the policy: [layers, q_heads, observed, head_dim].
    """

    def __init__(self, keys: Tensor, values: Tensor, observed: int, q_heads: int, reused: int) -> None:
        self.keys, self.values = keys, values
        self.tokens = keys.shape[2]
        self.computed = reused  # tokens whose KV is in place
        self._observed = observed
        shape = (keys.shape[0], q_heads, observed, keys.shape[3])
        self.queries = keys.new_empty(shape) if observed else None
        self.scale = 1.0  # of the attention logits, as the model gives it
        self._mask: Tensor | None = None

    def begin_chunk(self, tokens: int) -> None:
        """Prepare to compute the next `tokens` tokens."""
        self._chunk = tokens
        if self.computed == 0:
            self._mask = None
        else:
            reach = torch.arange(self.computed, self.computed + tokens, device=self.keys.device)
            seen = torch.arange(self.computed + tokens, device=self.keys.device)
            self._mask = seen[None, :] <= reach[:, None]

    def end_chunk(self) -> None:
        self.computed += self._chunk

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        start, end, self.scale = self.computed, self.computed + self._chunk, scale
        self.keys[layer, :, start:end] = key[0]
        self.values[layer, :, start:end] = value[0]
        if self.queries is not None:
            first = self.tokens - self._observed  # position of the first observed query
            if end > first:
                begin = max(start, first)
                self.queries[layer, :, begin - first : end - first] = query[0, :, begin - start :]
        return F.scaled_dot_product_attention(
            query,
            self.keys[layer, None, :, :end],
            self.values[layer, None, :, :end],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scale,
            enable_gqa=True,
        )


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One query per sequence against its cache, without repeating K and V to the query heads.

    query [n, q_heads, 1, d], keys and values [n, kv_heads, C, d], mask bool [n, 1, 1, C] (True is seen). The query
    heads of a group take the place of the query length.
    """
    n, q_heads, _, head_dim = query.shape
    grouped = query.reshape(n, keys.shape[1], -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(n, q_heads, 1, head_dim)


def rotate(keys: Tensor, angles: Tensor) -> Tensor:
    """Rotate keys [..., d] on by `angles` [..., d/2] radians (rotary embedding, halves convention)."""
    cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    first, second = keys.chunk(2, dim=-1)
    return keys * cos + torch.cat([-second, first], -1) * sin

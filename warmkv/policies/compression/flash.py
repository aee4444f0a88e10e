"""Flash attention of a chunk behind its prefix, on CUDA: causal and within a window, no mask.

FlashAttention 4 computes it where it is installed (the extra `flash`) and made for the GPU, Hopper and what followed;
it knows capped logits and sinks as well. Elsewhere torch's own kernel does, which is FlashAttention 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from warmkv.policies.compression.softmax import Softmax

log = logging.getLogger(__name__)
HEAD_DIM_MULTIPLE = 8
"""Of the channels that kernels take as they are; `scaled_dot_product_attention` copies others into padded ones."""
HOPPER = (9, 0)
"""The compute capability as of which FlashAttention 4 is faster than torch's kernel."""
TRIED = 1, 256
"""Tokens of the trials: it compiles another kernel for queries that one tile holds, those of a KV head together."""
LEAST_WORK = 1 << 27
"""Queries times keys times query heads below which torch's kernel is done sooner where either attends: FlashAttention 4
takes half of its time, but its call in Python 0.1 ms more of the host's."""


class _Kind(NamedTuple):
    """What FlashAttention 4 compiles a kernel for."""

    device: torch.device
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    is_windowed: bool
    softcap: float | None
    sinks: torch.dtype | None


def takes(query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> bool:
    """Return True if a kernel attends q [1, q_heads, n, d] to keys and values [1, kv_heads, m, d] on this device."""
    if query.device.type == "cpu" or query.shape[-1] % HEAD_DIM_MULTIPLE:
        return False
    if _chosen(query, keys, softmax) is not None:
        return True
    # Asked without `is_causal`, which there means causal from the first key on, and is refused where n < m.
    return softmax.is_standard and can_use_flash_attention(SDPAParams(query, keys, values, None, 0.0, False, True))


def attend(query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
    """Attend q [1, q_heads, n, d], the last n of m positions, to keys and values [1, kv_heads, m, d].

    Each query sees the keys up to its own, the newest of these where the softmax has a window. Strides are taken as
    they are, of all but the last dimension. Returns the shape of q. See `torch.nn.attention.bias.causal_lower_right`,
    which calls the same kernel of torch, and `torch.nn.attention.varlen` for the window.
    """
    q, k, v = (each.transpose(1, 2) for each in (query, keys, values))
    left, right = (softmax.window - 1, 0) if softmax.window else (None, None)  # keys before and behind its own
    out: Tensor
    if flash_attn_func := _chosen(query, keys, softmax):
        out, _ = flash_attn_func(
            q, k, v, softmax_scale=softmax.scale, causal=True, window_size=(left, right),
            softcap=softmax.softcap or 0.0, learnable_sink=softmax.sinks,
        )  # fmt: skip
    else:
        out = torch.ops.aten._flash_attention_forward(
            *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False),
            scale=softmax.scale,
            window_size_left=left,
            window_size_right=right,
        )[0]
    return out.transpose(1, 2)


def _chosen(query: Tensor, keys: Tensor, softmax: Softmax) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return FlashAttention 4's function where it attends in less time, or alone knows the softmax."""
    _, q_heads, queries, head_dim = query.shape
    sinks = None if softmax.sinks is None else softmax.sinks.dtype
    kind = _Kind(
        query.device, query.dtype, q_heads, keys.shape[1], head_dim, softmax.window > 0, softmax.softcap, sinks
    )
    function = _flash_attention_4(kind)  # tried, and so compiled, by the first chunk of all
    return None if softmax.is_standard and queries * keys.shape[2] * q_heads < LEAST_WORK else function


@lru_cache(maxsize=64)
def _flash_attention_4(kind: _Kind) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return FlashAttention 4's function if it attends on such a GPU; it is tried, which compiles it."""
    if kind.device.type != "cuda" or torch.cuda.get_device_capability(kind.device) < HOPPER or kind.dtype.itemsize != 2:
        return None
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    sinks = None if kind.sinks is None else torch.zeros(kind.q_heads, dtype=kind.sinks, device=kind.device)
    window = (0, 0) if kind.is_windowed else (None, None)
    try:
        for tokens in TRIED:
            query, key = (
                torch.zeros(1, tokens, heads, kind.head_dim, dtype=kind.dtype, device=kind.device)
                for heads in (kind.q_heads, kind.kv_heads)
            )
            flash_attn_func(
                query, key, key, causal=True, window_size=window, softcap=kind.softcap or 0.0, learnable_sink=sinks
            )
    except Exception as error:  # its own for what it does not know, and those of the compiler below it
        log.warning("FlashAttention 4 is installed but does not attend, torch's kernel does: %s (%s)", error, kind)
        return None
    log.info("FlashAttention 4 attends prompts: %s", kind)
    function: Callable[..., tuple[Tensor, Tensor]] = flash_attn_func
    return function

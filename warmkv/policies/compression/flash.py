"""Flash attention of a chunk behind its prefix, by torch's own kernel on CUDA: causal and within a window, no mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

HEAD_DIM_MULTIPLE = 8
"""Of the channels that the kernel takes as they are; `scaled_dot_product_attention` copies others into padded ones."""


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if the kernel attends q [1, q_heads, n, d] to keys and values [1, kv_heads, m, d] on this device."""
    if query.device.type == "cpu" or query.shape[-1] % HEAD_DIM_MULTIPLE:
        return False
    # Asked without `is_causal`, which there means causal from the first key on, and is refused where n < m.
    return can_use_flash_attention(SDPAParams(query, keys, values, None, 0.0, False, True))


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """Attend q [1, q_heads, n, d], the last n of m positions, to keys and values [1, kv_heads, m, d].

    Each query sees the keys up to its own, the newest `window` of these, or all if that is 0. Strides are taken as they
    are, of all but the last dimension. Returns the shape of q. See `torch.nn.attention.bias.causal_lower_right`, which
    calls the same kernel, and `torch.nn.attention.varlen` for the window.
    """
    q, k, v = (each.transpose(1, 2) for each in (query, keys, values))
    left, right = (window - 1, 0) if window else (None, None)  # keys before and behind its own that a query sees
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return out.transpose(1, 2)

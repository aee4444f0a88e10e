"""The one attention function of all models: keys and values go into the state of a step, and are attended there.

A transformers model calls it in every layer with q, k, v after rotation. The state travels through the model as the
keyword `warmkv` (reference: transformers' attention interface).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from warmkv.policies.compression.softmax import Softmax

ATTENTION = "warmkv"


class StepState(Protocol):
    """Where a step keeps its keys and values."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attend q [batch, q_heads, n, head_dim] to k and v [batch, kv_heads, n, head_dim]; returns the shape of q."""
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
    if warmkv is None:
        raise ValueError("this model attends through warmkv: call it with the engine's state as warmkv=...")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = warmkv.attend(module.layer_idx, query, key, value, Softmax(scale, softcap, s_aux))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _forward)
AttentionMaskInterface.register(ATTENTION, lambda **_: None)  # masks follow from the state, never from tensors

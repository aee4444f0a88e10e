"""Computing a prompt outside the engine, to look at what a policy would keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from warmkv.policies.compression.hook import ATTENTION
from warmkv.policies.compression.prefill_state import PrefillState, TokenClasses
from warmkv.policies.sliding import configured_windows
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec

CHUNK = 512


def kv_shape(model: Any) -> KVShape:
    """Return the size of a transformers causal LM's KV cache, in the dtype of its weights."""
    text = model.config.get_text_config()
    return KVShape(
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        dtype_bytes=model.get_input_embeddings().weight.dtype.itemsize,
        q_heads=text.num_attention_heads,
    )


def rotation(rotary: Any) -> Tensor:
    """Return radians per position [head_dim / 2] of a rotary embedding; of one per layer type (Gemma 3), of full
    attention.
    """
    names = ("inv_freq", "full_attention_inv_freq", "sliding_attention_inv_freq")
    found: Tensor = next(getattr(rotary, name) for name in names if getattr(rotary, name, None) is not None)
    return found


@torch.inference_mode()
def compute_prompt(
    model: Any,
    input_ids: Tensor | Sequence[int],
    spec: PolicySpec,
    *,
    classes: TokenClasses | None = None,
    chunk: int = CHUNK,
) -> PrefillState:
    """Run a prompt through a transformers causal LM and keep what the policy's rule looks at.

    Raises ValueError if input_ids [T] or [1, T] are not exactly one prompt.
    """
    known: KVShape | None = getattr(model, "kv_shape", None)
    model = getattr(model, "module", model)
    ids = torch.as_tensor(input_ids, dtype=torch.long, device=model.device)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or not len(ids):
        raise ValueError(f"input_ids must be one prompt, [T] or [1, T], got {list(ids.shape)}")
    windows = known.windows if known is not None else configured_windows(model.config.get_text_config())
    prompt = PrefillState.allocate(
        replace(kv_shape(model), windows=windows),
        ids.tolist(),
        [spec],
        dtype=model.get_input_embeddings().weight.dtype,
        device=model.device,
        inv_freq=rotation(model.get_decoder().rotary_emb).to(model.device, torch.float64),
        classes=classes,
    )
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        for start in range(0, len(ids), chunk):
            piece = ids[None, start : start + chunk]
            positions = torch.arange(start, start + piece.shape[1], device=model.device)[None]
            prompt.begin_chunk(piece.shape[1])
            model(input_ids=piece, position_ids=positions, use_cache=False, logits_to_keep=1, warmkv=prompt)
            prompt.end_chunk()
    finally:
        model.set_attn_implementation(before)
    return prompt

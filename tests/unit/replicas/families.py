"""Tiny random models of every family that transformers knows, from one recipe."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY, LAYERS, CONTEXT, WINDOW = 97, 3, 256, 12
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,  # wide enough that attention and argmax are far from uniform
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_NOT_TOKENS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_OWN: dict[str, dict[str, Any]] = {
    "cwm": dict.fromkeys(_NOT_TOKENS, 0),
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "granitemoehybrid": {"layer_types": ["attention"] * LAYERS, "mamba_n_heads": 4, "position_embedding_type": "rope"},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},  # low enough to matter
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "starcoder2": {"sliding_window": WINDOW},
    "qwen2_moe": {"sliding_window": None},
    "ministral": {"head_dim": 8},
}


def tiny_config(family: str, **changed: Any) -> Any:
    """Return the configuration of a tiny model: sizes that the family's configuration has, every layer type in turn."""
    kind = CONFIG_MAPPING[family]
    plain = kind()
    given = {name: size for name, size in _SIZES.items() if getattr(plain, name, None) is not None} | _NOT_TOKENS
    if getattr(plain, "sliding_window", None):
        given["sliding_window"] = WINDOW
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(plain, name, None):
            given[name] = (list(dict.fromkeys(kinds)) * LAYERS)[:LAYERS]
    return kind(**given | _OWN.get(family, {}) | changed)


def tiny_model(family: str, **changed: Any) -> Any:
    """Return a model of a family in float32 whose weights depend on the family alone; biases and sinks are not 0."""
    torch.manual_seed(sum(map(ord, family)))
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changed)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.3)
    return model

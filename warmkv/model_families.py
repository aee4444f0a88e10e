"""What model families have in common that their config.json files may leave out, by transformers' `model_type`.

Only data; a test compares all of it with the configurations and models of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TIED = frozenset({
    "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3_text", "granite_swa",
    "smollm3", "starcoder2", "vaultgemma",
})  # fmt: skip
"""The matrix before the logits is that of the embeddings unless a file denies it."""

UNGATED = frozenset({"apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi", "starcoder2"})
"""An MLP is two matrices, up and down."""

_HEAD_DIMS = {
    64: "gpt_oss",
    128: """afmoe cohere2_moe cwm ernie4_5 flint glm glm4 helium hy_v3 internlm3 kolibri1 minimax_m2 ministral3 seed_oss
        solar_open""",
    256: "vaultgemma",
}
"""Sizes of a head that do not follow from the width."""

_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
_NESTED: dict[str, tuple[int | None, ...]] = {
    "cohere2": (40, 8192, 64, None, None, 22528, 256000, 8192),
    "gemma": (28, 3072, 16, 16, 256, 24576, 256000, 8192),
    "gemma2": (26, 2304, 8, 4, 256, 9216, 256000, 8192),
    "gemma3_text": (26, 2304, 8, 4, 256, 9216, 262208, 131072),
    "llama": (32, 4096, 32, None, None, 11008, 32000, 2048),
    "mistral": (32, 4096, 32, 8, None, 14336, 32000, 131072),
    "qwen2": (32, 4096, 32, 32, None, 22016, 151936, 32768),
    "qwen3": (32, 4096, 32, 32, 128, 22016, 151936, 32768),
}
"""Families of the language models in multimodal ones, of which files hold only what differs from these."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **{family: {"head_dim": size} for size, families in _HEAD_DIMS.items() for family in families.split()},
    **{
        family: {key: figure for key, figure in zip(_KEYS, figures, strict=True) if figure is not None}
        for family, figures in _NESTED.items()
    },
}
"""What transformers takes for a key that a file does not have, where it is no function of others."""

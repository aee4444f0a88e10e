"""Compare sizes of models by their config.json with what transformers builds of it and what is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from warmkv.model_families import _KEYS, _NESTED, DEFAULTS, TIED
from warmkv.model_shape import ModelShape, ModelShapeError, figures, kv_figures
from warmkv.policies.memory_plan import ModelSizes
from warmkv.replicas.loading.supported import SERVED

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "float16",
}  # fmt: skip
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "ERNIE-4.5-21B-A3B": (21.83e9, {
        "model_type": "ernie4_5_moe", "num_hidden_layers": 28, "hidden_size": 2560, "num_attention_heads": 20,
        "num_key_value_heads": 4, "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1,
        "vocab_size": 103424,
    }),
    "gemma-2-2b": (2.61e9, {
        "model_type": "gemma2", "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000,
    }),
    "gpt-neox-20b": (20.55e9, {
        "model_type": "gpt_neox", "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
        "intermediate_size": 24576, "vocab_size": 50432, "tie_word_embeddings": False,
    }),
    "starcoder2-7b": (7.17e9, {
        "model_type": "starcoder2", "num_hidden_layers": 32, "hidden_size": 4608, "num_attention_heads": 36,
        "num_key_value_heads": 4, "intermediate_size": 18432, "vocab_size": 49152,
    }),
    "gpt-oss-20b": (20.91e9, {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "vocab_size": 201088, "tie_word_embeddings": False,
    }),
    "gemma-3-4b": (3.88e9, {
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240,
        },
    }),
    "gemma-3-12b": (11.77e9, {
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 48, "hidden_size": 3840, "num_attention_heads": 16,
            "num_key_value_heads": 8, "intermediate_size": 15360,
        },
    }),
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "dots1": {"head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2, "num_shared_expert": 1},
    "ministral": {"head_dim": 128},
    "granitemoehybrid": {
        "layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
    },
}  # fmt: skip
"""What the default configuration of a family leaves open."""


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parameters(shape: ModelShape) -> int:
    return shape.layer_weights + (1 if shape.tied else 2) * shape.head_weights


@pytest.mark.parametrize("family", sorted(SERVED))
def test_the_parameters_of_every_served_family_are_those_of_its_model(family, tmp_path):
    """Count a model of four layers in the family's own width, by a file without what its class takes by default."""
    config = CONFIG_MAPPING[family](num_hidden_layers=4, **OWN.get(family, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = config.to_dict()
    real = sum(parameter.numel() for parameter in model.parameters())
    assert parameters(ModelShape(**figures(described))) == pytest.approx(real, rel=0.01)
    left_out = {"tie_word_embeddings", *(DEFAULTS.get(family, {}).keys() - {"num_hidden_layers"})}
    less = {key: value for key, value in described.items() if key not in left_out}
    assert figures(written(tmp_path, less)) == figures(described)


def test_what_files_may_leave_out_is_what_transformers_takes():
    odd = {"num_attention_heads": 4, "hidden_size": 192}  # so that 48 is a size that follows from them
    chosen = {family: getattr(CONFIG_MAPPING[family](**odd), "head_dim", None) for family in SERVED}
    own = {family: size for family, size in chosen.items() if size not in (None, 48)}
    assert {family: kept["head_dim"] for family, kept in DEFAULTS.items() if "head_dim" in kept} == own
    assert {family for family in SERVED if CONFIG_MAPPING[family]().tie_word_embeddings} == TIED
    for family, kept in _NESTED.items():
        plain = CONFIG_MAPPING[family]().to_dict()
        assert {key: plain[key] for key in DEFAULTS[family]} == DEFAULTS[family]
        others = dict(zip(_KEYS, kept, strict=True)).keys() - DEFAULTS[family].keys()
        assert others <= {"head_dim", "num_key_value_heads"}  # which follow from the others


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name, tmp_path):
    count, config = PUBLISHED[name]
    assert parameters(ModelShape.model_validate(written(tmp_path, config))) == pytest.approx(count, rel=0.002)


def test_only_the_experts_of_a_token_are_active():
    shape = ModelShape(**figures(PUBLISHED["ERNIE-4.5-21B-A3B"][1]))
    assert shape.active_weights == pytest.approx(3.09e9, rel=0.01)
    assert ModelSizes.of(shape).intermediate == 6 * 1536 + 2 * 1536  # and 12,288 in the dense layer


def test_the_dtype_is_that_of_the_whole_model_or_two_bytes(tmp_path):
    """Read it where Mistral-Small-3.1 tells it; gpt-oss tells none."""
    text = {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"}
    for told, size in [({"torch_dtype": "float32"}, 4), ({"dtype": "float16"}, 2), ({}, 2)]:
        assert kv_figures(written(tmp_path, {"text_config": text, **told}))["dtype_bytes"] == size
    nested = {"text_config": {**text, "dtype": None, "torch_dtype": "bfloat16"}, "torch_dtype": "float32"}
    assert kv_figures(nested)["dtype_bytes"] == 2


@pytest.mark.parametrize(
    ("hybrid", "layers"),
    [
        ({"full_attention_interval": 4, "linear_conv_kernel_dim": 4}, 8),  # Qwen3-Next
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, 16),
        ({"layer_types": (["mamba"] * 7 + ["attention"]) * 4, "mamba_d_state": 128}, 4),  # Granite 4
        ({"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}, 4),  # Jamba
        ({"hybrid_override_pattern": "M-M*-M" * 5 + "M-"}, 5),  # Nemotron-H
        ({"attn_layer_indices": [9, 18, 27], "mamba_d_state": 256}, 3),  # Bamba
        ({"mamba_d_ssm": 1024}, 32),  # Falcon-H1 attends in every layer
        ({"num_kv_shared_layers": 12}, 20),  # Gemma 3n
    ],
)
def test_of_a_hybrid_the_layers_that_attend_are_the_cache_and_its_parameters_are_not_counted(hybrid, layers):
    assert kv_figures(LLAMA_8B | hybrid)["layers"] == layers
    with pytest.raises(ModelShapeError, match="belongs to an architecture that is not counted here"):
        figures(LLAMA_8B | hybrid)


def test_falcon_has_keys_of_its_own_for_kv_heads():
    falcon = {"num_attention_heads": 64, "num_hidden_layers": 2, "hidden_size": 4096, "num_kv_heads": 8}
    assert kv_figures(falcon | {"multi_query": True})["kv_heads"] == 1
    assert kv_figures(falcon | {"multi_query": True, "new_decoder_architecture": True})["kv_heads"] == 8


def test_experts_of_which_layers_differ_are_refused():
    mixed = LLAMA_8B | {"num_experts": 8, "num_experts_per_tok": 2}
    assert figures(mixed | {"moe_topk": [2, 2], "moe_intermediate_size": [64, 64]})["intermediate"] == 64
    for odd in ({"moe_intermediate_size": [64, 32]}, {"decoder_sparse_step": 2}, {"moe_layer_freq": [0, 1]}):
        with pytest.raises(ModelShapeError, match="give the model's figures yourself"):
            figures(mixed | odd)
    with pytest.raises(ModelShapeError, match="lacks 'num_experts_per_tok'"):
        figures(LLAMA_8B | {"num_experts": 8})


INT4 = {"weights": {"num_bits": 4, "group_size": 128}}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": INT4}}, 4.125),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": None}}}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "another"}, None),
    ],
)
def test_layers_of_a_quantised_checkpoint_take_its_bits(quantization, bits):
    """Leave embeddings and head in the dtype; in warmkv's own engine, which dequantises, everything."""
    plain = ModelShape(**figures(LLAMA_8B))
    shape = ModelShape(**figures(LLAMA_8B | {"quantization_config": quantization}))
    assert shape.weight_bits == bits
    weights = ModelSizes.of(shape, quantised=True).weights
    assert weights == plain.layer_weights * (bits or 16) / 8 + 2 * 2 * plain.head_weights
    for packed in (False, True):
        assert ModelSizes.of(shape, packed=packed) == ModelSizes.of(plain, packed=packed)
    assert shape.dequantised == plain
    if quantization["quant_method"] == "awq":
        assert weights == pytest.approx(5.73e9, rel=0.01)  # as published

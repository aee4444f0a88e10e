"""What vLLM is started with on GPUs: memory of all of them, models by their files. Without vLLM and GPUs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warmkv.config import Config, parse
from warmkv.policies.memory_plan import MemoryPlanError
from warmkv.replicas import device_memory
from warmkv.replicas.engines import vllm_start
from warmkv.replicas.engines.vllm_start import Model

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "vocab_size": 102_400,
    "max_position_embeddings": 163_840,
    "torch_dtype": "bfloat16",
}

PHI_3_VISION = {
    "model_type": "llava",
    "torch_dtype": "bfloat16",
    "text_config": {"model_type": "phi3", "num_hidden_layers": 40, "hidden_size": 5120},
}
GEMMA_3_12B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 3840,
        "intermediate_size": 15360,
    },
}


@pytest.fixture
def on_80_gb(monkeypatch, tmp_path) -> Callable[..., tuple[Config, Model, float]]:
    """Return settings of vLLM on GPUs of 80 GB for a config.json and weights of so many bytes, model, share."""
    for name, told in (("mem_get_info", (80 * 10**9,) * 2), ("memory_reserved", 0), ("get_device_name", "H100")):
        monkeypatch.setattr(torch.cuda, name, lambda device, told=told: told)

    def made(described: Any, weights: int, gpus: int, **sizes: Any) -> tuple[Config, Model, float]:
        index = {"metadata": {"total_size": weights}}
        files = {"config": described, "generation_config": {"eos_token_id": 2}, "model.safetensors.index": index}
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / "model-00001.safetensors").touch()
        settings = {
            "model": {"path": str(tmp_path), "device": "cuda"},
            "engine": {"kind": "vllm", "kv_bytes": sizes.get("kv", "auto")},
            "prefix_cache": {"memory_bytes": sizes.get("stored", "auto")},
            "cluster": {"gpus_per_replica": gpus},
        }
        config = parse(settings)
        model = vllm_start.read_model(config)
        return config, model, device_memory.share_of(config.cluster, 1, model.device)

    return made


@pytest.mark.parametrize(
    ("described", "weights", "gpus"),
    [(LLAMA_70B, 141_107_412_992, 4), (LLAMA_70B | AWQ, 39_700_000_000, 1), (DEEPSEEK_V2_LITE, 31_412_968_448, 1)],
    ids=["tensor parallel", "quantised", "MLA"],
)
def test_a_model_fits_the_gpus_that_vllm_spreads_it_over(on_80_gb, described, weights, gpus):
    plan, misfit = vllm_start.plan_memory(*on_80_gb(described, weights, gpus))
    lines = {line.name: line.bytes for line in plan.lines}
    assert (plan.given.bytes, lines["weights"], misfit) == (int(gpus * 80e9 * 0.9), weights, "")
    assert list(lines) == ["weights", "activations", "slots", "prefixes"]  # nothing of warmkv's own kernels
    assert lines["slots"] + lines["prefixes"] == pytest.approx(plan.given.bytes - weights, rel=0.05)


def test_a_model_that_does_not_fit_is_left_to_vllm_where_it_measures(on_80_gb):
    plan, misfit = vllm_start.plan_memory(*on_80_gb(LLAMA_70B, 141_107_412_992, 1))
    assert plan.needed > plan.most
    assert "does not fit the memory of a replica" in misfit
    with pytest.raises(MemoryPlanError, match="does not fit"):
        vllm_start.plan_memory(*on_80_gb(LLAMA_70B, 141_107_412_992, 1, kv="1GiB"))


def test_of_mla_and_shared_experts_cache_and_vocabulary_are_known(on_80_gb):
    _, model, _ = on_80_gb(DEEPSEEK_V2_LITE, 31_412_968_448, 1)
    assert (model.token_bytes, model.sizes.vocabulary) == (27 * (512 + 64) * 2, 102_400)


@pytest.mark.parametrize(
    ("described", "token_bytes", "vocabulary"),
    [(GEMMA_3_12B, 48 * 2 * 8 * 256 * 2, 262_208), (PHI_3_VISION, 40 * 2 * 32 * 160 * 2, 32_064)],
    ids=["head_dim and vocab_size", "num_attention_heads"],
)
def test_what_a_file_leaves_out_is_the_default_of_its_family(on_80_gb, described, token_bytes, vocabulary):
    """Leave out what multimodal configurations do: they hold only what differs from it."""
    _, model, _ = on_80_gb(described, 24_400_000_000, 1)
    assert (model.token_bytes, model.sizes.vocabulary) == (token_bytes, vocabulary)


@pytest.mark.parametrize(
    ("sizes", "measured"), [({"kv": "8GiB", "stored": "4GiB"}, False), ({"stored": "4GiB"}, False), ({}, True)]
)
def test_each_gpu_gets_its_part_of_the_cache(on_80_gb, monkeypatch, sizes, measured):
    """As `engine.kv_bytes` and `prefix_cache.memory_bytes` are those of a replica."""
    given: dict[str, Any] = {}
    modules = {
        "vllm.config": SimpleNamespace(StructuredOutputsConfig=SimpleNamespace),
        "vllm.config.kv_events": SimpleNamespace(KVEventsConfig=SimpleNamespace),
        "vllm.engine.arg_utils": SimpleNamespace(AsyncEngineArgs=given.update),
        "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=SimpleNamespace(from_engine_args=lambda *_, **__: None)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.setenv(name, "1")
    config, model, share = on_80_gb(LLAMA_70B, 141_107_412_992, 4, **sizes)
    plan, _ = vllm_start.plan_memory(config, model, share)
    vllm_start.start_llm(config, model, plan, 1, Path("/gone"), None)  # type: ignore[arg-type]
    each = None if measured else (plan.kv.bytes + plan.stored.bytes) // 4
    assert (given["tensor_parallel_size"], given["kv_cache_memory_bytes"]) == (4, each)

"""Checkpoints with quantised weights: packed here number by number, served as the weights are that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2_5_VLConfig
from transformers.quantizers import quantizer_compressed_tensors, quantizer_finegrained_fp8

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.loading.test_loading import SHAPE
from warmkv.config import ModelConfig
from warmkv.replicas.loading import packed_weights
from warmkv.replicas.loading.load import load_model
from warmkv.replicas.loading.packed_integers import awq_weight, gptq_weight
from warmkv.replicas.loading.packed_weights import packed_bytes

GROUP = 16
Stored = dict[str, Tensor]
Quantise = Callable[[Tensor, np.random.Generator], tuple[Stored, Tensor]]  # what is stored, and what it stands for


def words(numbers: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack each row's numbers [n, m] into int32 [n, m * bits / 32]; `places` of the numbers of a word, lowest first."""
    count = 32 // bits
    packed = []
    for row in numbers.tolist():
        packed.append([])
        for at in range(0, len(row), count):
            word = sum(number << bits * (places or range(count))[i] for i, number in enumerate(row[at : at + count]))
            packed[-1].append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(packed, dtype=torch.int32)


def integers(weight: Tensor, bits: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw numbers [out, in], zeros [out, groups] from 1 on and scales [out, groups] for a weight [out, in]."""
    out, columns = weight.shape
    groups = columns // GROUP
    numbers, zeros = random.integers(0, 1 << bits, (out, columns)), random.integers(1, 1 << bits, (out, groups))
    scales = (random.uniform(0.5, 1, (out, groups)) / (1 << bits)).astype(np.float16)
    return numbers, zeros, scales


def gptq(layout: str, bits: int) -> Quantise:
    def quantise(weight: Tensor, random: np.random.Generator) -> tuple[Stored, Tensor]:
        numbers, zeros, scales = integers(weight, bits, random)
        order = random.permutation(np.repeat(np.arange(weight.shape[1] // GROUP), GROUP))  # act-order: any group a row
        plain = torch.empty_like(weight)
        for o in range(weight.shape[0]):
            for i, group in enumerate(order):
                plain[o, i] = float(scales[o, group]) * int(numbers[o, i] - zeros[o, group])
        stored = {
            "qweight": words(numbers, bits).T.contiguous(),
            "qzeros": words(zeros.T - (1 if layout == "gptq" else 0), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(order.astype(np.int32)),
        }
        return stored, plain

    return quantise


def awq(bits: int) -> Quantise:
    def quantise(weight: Tensor, random: np.random.Generator) -> tuple[Stored, Tensor]:
        numbers, zeros, scales = integers(weight, bits, random)
        # AutoAWQ's WQLinear_GEMM: of a word's columns, the one at order[i] has place i.
        order = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}[bits]
        places = tuple(order.index(column) for column in range(32 // bits))
        plain = torch.empty_like(weight)
        for o in range(weight.shape[0]):
            for i in range(weight.shape[1]):
                plain[o, i] = float(scales[o, i // GROUP]) * int(numbers[o, i] - zeros[o, i // GROUP])
        stored = {
            "qweight": words(numbers.T, bits, places),
            "qzeros": words(zeros.T, bits, places),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return stored, plain

    return quantise


def compressed_int4(weight: Tensor, random: np.random.Generator) -> tuple[Stored, Tensor]:
    numbers, _, scales = integers(weight, 4, random)
    plain = torch.empty_like(weight)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            plain[o, i] = float(scales[o, i // GROUP]) * (int(numbers[o, i]) - 8)
    stored = {"weight_packed": words(numbers, 4), "weight_scale": torch.from_numpy(scales.astype(np.float32))}
    return {**stored, "weight_shape": torch.tensor(weight.shape)}, plain


def compressed_fp8(weight: Tensor, random: np.random.Generator) -> tuple[Stored, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def fp8(weight: Tensor, random: np.random.Generator) -> tuple[Stored, Tensor]:
    """Quantise blocks of 16 x 16 with a scale each."""
    blocks = weight.view(len(weight) // 16, 16, -1, 16)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    rounded = (blocks / scale).to(torch.float8_e4m3fn)
    stored = {"weight": rounded.view(weight.shape), "weight_scale_inv": scale[:, 0, :, 0].clone()}
    return stored, (rounded.float() * scale).view(weight.shape)


def compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "format": layout}
    settings = {"config_groups": {"group_0": scheme}, "format": layout, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", **settings, "ignore": ["lm_head"]}


METHODS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "gptq": (gptq("gptq", 4), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq_v2": (
        gptq("gptq_v2", 8),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq(4), {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}),
    "compressed int4": (
        compressed_int4,
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    ),
    "compressed fp8": (
        compressed_fp8,
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
}


def save_quantised(folder: Path, quantise: Quantise, settings: dict[str, Any]) -> LlamaForCausalLM:
    """Save a random model with quantised projections; returns the model that it stands for."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    plain = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "initializer_range": 0.3}))
    stored: Stored = {}
    for name, weight in plain.state_dict().items():
        if name.endswith("proj.weight"):
            parts, meant = quantise(weight, random)
            stored.update({f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()})
            weight.copy_(meant)
        else:
            stored[name] = weight
    plain.config.quantization_config = settings
    plain.config.save_pretrained(folder)
    plain.generation_config.eos_token_id = 7
    plain.generation_config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_are_served_in_the_models_dtype_where_nothing_computes_them(
    tmp_path: Path, method: str, dtype: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there some are computed as they are")
    quantise, settings = METHODS[method]
    plain = save_quantised(tmp_path, quantise, settings)
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu", dtype=dtype), packed=False)
    assert model.eos_ids == {7}
    served = dict(model.module.named_parameters())
    assert {parameter.dtype for parameter in served.values()} == {getattr(torch, dtype)}
    for name, meant in plain.named_parameters():
        torch.testing.assert_close(served[name].detach(), meant.detach().to(getattr(torch, dtype)), rtol=0, atol=1e-6)
    drawn = Driver(model).run(make_request([1, 2, 3], new=6, ignore_eos=True))
    if dtype == "float32":  # another rounding may draw other tokens
        with torch.no_grad():
            ids = torch.tensor([[1, 2, 3]])
            expected = plain.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert drawn == [expected[0, 3:].tolist()]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_of_every_size_are_read(bits: int) -> None:
    random, weight = np.random.default_rng(bits), torch.empty(32, 64)
    stored, meant = gptq("gptq", bits)(weight, random)
    assert torch.equal(gptq_weight(**stored, zero_offset=1), meant)
    if bits > 2:
        stored, meant = awq(bits)(weight, random)
        assert torch.equal(awq_weight(**stored), meant)


def test_integers_of_other_sizes_are_refused_by_the_name_of_the_weight(tmp_path: Path) -> None:
    save_quantised(tmp_path, gptq("gptq", 4), METHODS["gptq"][1])
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if name.endswith("q_proj.qweight"))
    stored[name] = stored[name][:3].contiguous()  # as 3 bits each would take
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name.removesuffix(".qweight")):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_of_a_weight_are_read_from_several_files_and_missing_ones_are_named(tmp_path: Path, method: str) -> None:
    """Split the files as a saver of large models does, wherever one is full."""
    plain = save_quantised(tmp_path, *METHODS[method])
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    split = {part: {n: t for n, t in stored.items() if n.endswith("scales") == part} for part in (False, True)}
    for part, tensors in split.items():
        save_file(tensors, tmp_path / f"model-{part}.safetensors", metadata={"format": "pt"})
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu", dtype="float32"), packed=False)
    served = dict(model.module.named_parameters())
    for name, meant in plain.named_parameters():
        torch.testing.assert_close(served[name].detach(), meant.detach(), rtol=0, atol=1e-6)
    (tmp_path / "model-True.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj in .*: no scales"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "unheard-of"},
    ],
)
def test_weights_that_cannot_be_loaded_here_are_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = LlamaConfig(**SHAPE)
    config.quantization_config = settings
    config.save_pretrained(tmp_path)
    method = settings["quant_method"]
    with pytest.raises(ValueError, match=rf"quantised by {method} cannot be loaded here: .* \(engine.kind: vllm\)"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_family_without_a_causal_model_is_refused_by_name(tmp_path: Path, method: str) -> None:
    save_quantised(tmp_path, *METHODS[method])
    config = Qwen2_5_VLConfig()
    config.quantization_config = METHODS[method][1]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="family qwen2_5_vl cannot be served"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(("method", "package"), [("fp8", "accelerate"), ("compressed int4", "compressed_tensors")])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, package: str
) -> None:
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: False)
    monkeypatch.setattr(quantizer_compressed_tensors, "is_compressed_tensors_available", lambda: False)
    save_quantised(tmp_path, *METHODS[method])
    with pytest.raises(ValueError, match=rf"cannot be loaded here: .*{package.replace('_', '.')}.*engine.kind: vllm"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def test_what_was_dequantised_is_packed_like_any_other_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 1)
    save_quantised(tmp_path, *METHODS["awq"])
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu"))
    if packed_weights.can_pack(torch.device("cpu"), torch.float32):
        assert packed_bytes(model.module) > 0
    assert len(Driver(model).run(make_request([1, 2, 3], new=6, ignore_eos=True))[0]) == 6

"""Which models are served, and which are refused because warmkv would compute them wrongly."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from tests.unit.replicas.conftest import Driver, make_request, random_model
from tests.unit.replicas.families import CONTEXT, WINDOW, tiny_model
from warmkv.config import ModelConfig
from warmkv.faults import UserError
from warmkv.platform.local import check_model
from warmkv.policies.compression.observe import compute_prompt
from warmkv.policies.compression.scoring import window_votes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading import context, packed_weights, supported
from warmkv.replicas.loading.load import fetch, load_model, prepare, resolve_dtype
from warmkv.replicas.loading.packed_weights import LEAST_WEIGHTS, can_pack, pack_linears, packed_bytes
from warmkv.replicas.loading.tokenizer import load_max_context
from warmkv.replicas.protocol import UnservableRequestError

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default"}
THETAS = {"sliding_attention": 1e4, "full_attention": 5e5}


def test_limits_and_shape_follow_from_the_model():
    model = prepare(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=64, head_dim=16)))
    assert model.max_context == 128
    assert model.kv_shape.windows == (64, 64)
    assert model.kv_shape.token_bytes == 2 * 2 * 2 * 16 * 4
    assert (model.vocabulary, model.kv_shape.q_heads, model.fixed_rotation) == (50, 4, True)
    assert model.eos_ids == frozenset()


def test_dtype_follows_from_the_device():
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1)), "rotary"),
        (lambda: FalconForCausalLM(FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)), "."),
    ],
    ids=["no rotation", "own attention"],
)
def test_models_that_would_be_computed_wrongly_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        prepare(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: CohereForCausalLM(CohereConfig(**SHAPE)),
        lambda: PhiForCausalLM(PhiConfig(**SHAPE, partial_rotary_factor=0.5)),
    ],
    ids=["interleaved rotation", "partial rotation"],
)
def test_streaming_is_refused_where_sinks_cannot_be_rotated_on_and_the_rest_is_served(make):
    torch.manual_seed(0)
    plain = make().eval()
    torch.manual_seed(0)
    driver = Driver(prepare(make()))
    with pytest.raises(UnservableRequestError, match="streaming_llm"):
        driver.submit(make_request([1, 2, 3], new=20, policy="streaming_llm@10"))
    with torch.no_grad():
        expected = plain.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    assert driver.run(make_request([1, 2, 3], new=6)) == [expected]


def test_a_storage_whose_codes_do_not_fit_the_head_is_refused(driver):
    odd = Driver(prepare(LlamaForCausalLM(LlamaConfig(**{**SHAPE, "head_dim": 4})).eval()))
    with pytest.raises(UnservableRequestError, match="turbo3 needs a head_dim that is a multiple of 8"):
        odd.submit(make_request([1, 2, 3], policy="full+turbo3"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (8, 1), (1, 300), (0, 3)])
def test_a_packed_layer_computes_what_the_plain_one_did(rows, bias):
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("this build of torch packs no weights")
    torch.manual_seed(0)
    large, small = torch.nn.Linear(256, LEAST_WEIGHTS // 256, bias=bias), torch.nn.Linear(LEAST_WEIGHTS // 256, 8)
    module = torch.nn.Sequential(large, torch.nn.ReLU(), small)
    x = torch.randn(*rows, 256)
    expected, size = module(x), large.weight.nbytes
    pack_linears(module)
    assert packed_bytes(module) == size  # and the small one stays: oneDNN's call costs more than it saves
    torch.testing.assert_close(module(x), expected)


def test_only_plain_float32_layers_on_a_cpu_are_packed():
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(torch.device("cpu"), torch.bfloat16)
    assert packed_bytes(prepare(random_model("llama"), packed=False).module) == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what is mapped")
@pytest.mark.parametrize(
    ("dtype", "packed", "mapped"), [("float32", False, 1), ("float32", True, 0), ("bfloat16", True, 0)]
)
def test_weights_are_read_by_a_memory_map_that_goes_where_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, packed: bool, mapped: int
) -> None:
    """So they are in memory once: as pages of the file, or as a copy."""
    if packed and dtype == "float32" and not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("this build of torch packs no weights")
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 1)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu", dtype=dtype), packed=packed)
    gc.collect()
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len({str(file) for file in tmp_path.glob("*.safetensors")} & files) == mapped
    plain = model.module.get_input_embeddings().weight
    assert plain.untyped_storage().nbytes() == plain.nbytes


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gemma3_text", {}),
        ("olmo3", {"rope_parameters": {kind: ROPE | {"rope_theta": theta} for kind, theta in THETAS.items()}}),
        ("granite_swa", {"layer_rope_theta": [1e4, 0, 1e4]}),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}),
    ],
    ids=["gemma3_text", "olmo3", "granite_swa", "smollm3"],
)
@pytest.mark.parametrize("policy", ["streaming_llm@10", "expected_attention@10:window=4"])
def test_methods_that_turn_keys_are_refused_where_layers_rotate_differently(family, changed, policy):
    driver = Driver(prepare(tiny_model(family, **changed)))
    with pytest.raises(UnservableRequestError, match=policy.partition("@")[0]):
        driver.submit(make_request([1, 2, 3, *range(20)], new=20, policy=policy))
    driver.run(make_request([1, 2, 3, *range(20)], new=20, policy="snapkv@10:window=4"))
    driver.finished("request")


@pytest.mark.parametrize("thetas", [(1e4, 1e4), (1e4, 5e4)])
def test_frequencies_that_are_close_are_compared_themselves(thetas):
    """Compare in bfloat16, where keys at position 1 do not show that layers differ in them."""
    kinds = ("sliding_attention", "full_attention")
    rope = {kind: ROPE | {"rope_theta": theta} for kind, theta in zip(kinds, thetas, strict=True)}
    model = prepare(tiny_model("olmo3", rope_parameters=rope).to(torch.bfloat16))
    assert model.fixed_rotation == (len(set(thetas)) == 1)


def contexts(folder: Path, module: Any) -> tuple[int, int]:
    """Return the context of a model that a replica serves, and the one that its folder's configuration tells."""
    module.config.save_pretrained(folder)
    return prepare(module).max_context, load_max_context(ModelConfig(path=str(folder)), "warmkv")


def test_a_family_that_nobody_compared_is_served_within_its_window(tmp_path, monkeypatch):
    assert contexts(tmp_path, tiny_model("cohere2")) == (CONTEXT, CONTEXT)
    monkeypatch.setattr(supported, "SERVED", frozenset())
    assert contexts(tmp_path, tiny_model("cohere2")) == (WINDOW, WINDOW)
    assert contexts(tmp_path, tiny_model("llama")) == (CONTEXT, CONTEXT)
    monkeypatch.setattr(context, "configured_windows", lambda text: ())
    with pytest.raises(ValueError, match="cohere2 cannot be served: its layers have windows"):
        prepare(tiny_model("cohere2"))


def test_a_rotation_that_changes_at_a_length_is_served_within_it(tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    assert contexts(tmp_path, tiny_model("phi3", original_max_position_embeddings=64, rope_parameters=rope)) == (64, 64)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_scores_are_shares_of_the_models_own_softmax(family):
    """Column sums and window votes of a prompt in chunks against the weights of transformers' eager attention."""
    module, tokens = tiny_model(family), [3 * i % 97 for i in range(40)]
    module.set_attn_implementation("eager")
    with torch.no_grad():
        weights = module(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True).attentions
    prompt = compute_prompt(prepare(module), tokens, PolicySpec.model_validate("h2o@20"), chunk=16)
    votes = compute_prompt(module, tokens, PolicySpec.model_validate("snapkv@20:window=6"), chunk=16)
    for layer, mine in enumerate(weights):
        grouped = mine[0].unflatten(0, (2, 2))  # KV heads, and query heads of each
        assert prompt.column_sums is not None
        torch.testing.assert_close(prompt.column_sums[layer], grouped.sum(dim=(1, 2)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            window_votes(votes, layer, 6), grouped[:, :, -6:].sum(dim=(1, 2))[:, :-6], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("refuse", [check_model, fetch, load_model])
def test_an_adapter_is_refused_with_its_kind_and_its_model_whatever_lies_beside_it(tmp_path: Path, refuse: Any) -> None:
    config = ModelConfig(path=str(tmp_path), device="cpu")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    refuse(config)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')
    with pytest.raises(UserError, match=r"adapter_config\.json: LORA\) of some/base, .*merge_and_unload"):
        refuse(config)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="unknown"):
        refuse(config)

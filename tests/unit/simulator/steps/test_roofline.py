import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from warmkv.config import ConfigError, load, parse
from warmkv.gpus import CATALOGUE, Gpu
from warmkv.model_shape import TINY, ModelShape, ModelShapeError, figures, kv_figures
from warmkv.models.tiny import PATH
from warmkv.policy_spec import STORAGES, PolicySpec
from warmkv.simulator.steps.costs import StepKind
from warmkv.simulator.steps.roofline import roofline

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
H100 = Gpu.model_validate("H100-SXM")
OVERHEAD = "warmkv.simulator.steps.roofline.OVERHEAD_SECONDS"
IDEAL = H100.model_copy(update={"flops_efficiency": 1, "bandwidth_efficiency": 1})


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return ModelShape.model_validate(tmp_path)


def kind(policy):
    return StepKind.of(PolicySpec.model_validate(policy))


def linear_weights(model):
    """Every matrix of a layer that a token is multiplied with, one by one."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = [(model.hidden, q), (model.hidden, kv), (model.hidden, kv), (q, model.hidden)]
    mlp = [(model.hidden, model.intermediate), (model.hidden, model.intermediate), (model.intermediate, model.hidden)]
    return sum(rows * columns for rows, columns in attention + mlp)


def chunk_flops(model, tokens, end):
    """Operations of a chunk, pair by pair."""
    total = 2 * model.hidden * model.vocabulary  # logits of its last token
    for position in range(end - tokens, end):
        total += 2 * model.layers * linear_weights(model)
        total += model.layers * model.heads * (position + 1) * 4 * model.head_dim  # scores, and values by them
    return total


def kv_bytes(model, entries, storage="model"):
    return entries * model.layers * model.kv_heads * STORAGES[storage].entry_bytes(model.head_dim, model.dtype_bytes)


def weight_bytes(model):
    return model.dtype_bytes * (model.layers * linear_weights(model) + model.hidden * model.vocabulary)


@pytest.fixture(autouse=True)
def no_overhead(monkeypatch):
    monkeypatch.setattr(OVERHEAD, 0.0)


@given(tokens=st.integers(1, 2048), before=st.integers(0, 100_000))
def test_a_chunk_takes_its_arithmetic_or_its_traffic(tokens, before):
    model = ModelShape(
        layers=3, hidden=64, heads=8, kv_heads=2, head_dim=16, intermediate=160, vocabulary=500, dtype_bytes=2
    )
    cost = roofline(model, IDEAL).of(kind("full")).prefill
    end = before + tokens
    expected = max(
        chunk_flops(model, tokens, end) / H100.flops,
        (weight_bytes(model) + kv_bytes(model, end + tokens)) / H100.bandwidth,  # all read, its own written
    )
    assert cost.seconds(tokens, end) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("policy", ["full", "snapkv@0.2+fp8", "full+kivi4"])
@pytest.mark.parametrize(("batch", "entries"), [(1, 1000), (16, 100_000), (2000, 2_000)])
def test_a_decode_step_takes_its_arithmetic_or_its_traffic(model, policy, batch, entries):
    cost = roofline(model, IDEAL).of(kind(policy)).decode
    flops = 2 * batch * (model.layers * linear_weights(model) + model.hidden * model.vocabulary)
    flops += 4 * model.layers * model.heads * model.head_dim * entries
    traffic = weight_bytes(model) + kv_bytes(model, entries + batch, kind(policy).storage)
    assert cost.seconds(batch, entries) == pytest.approx(max(flops / H100.flops, traffic / H100.bandwidth), rel=1e-9)


def test_quantised_layers_are_read_in_their_bits(model):
    cost = roofline(model.model_copy(update={"weight_bits": 4.25}), IDEAL).of(kind("full")).decode
    layers, head = model.layers * linear_weights(model) * 4.25 / 8, model.hidden * model.vocabulary * 2
    assert cost.seconds(1, 10) == pytest.approx((layers + head + kv_bytes(model, 11)) / H100.bandwidth, rel=1e-9)


def test_efficiency_overhead_and_the_share_of_a_gpu(model, monkeypatch):
    ideal = roofline(model, IDEAL).of(kind("full"))
    flags = ("simulator.gpu.flops_efficiency=0.5", "simulator.gpu.bandwidth_efficiency=0.25")
    real = load(flags=flags, environ={}).simulator.gpu
    monkeypatch.setattr(OVERHEAD, 0.002)
    cost = roofline(model, real, 0.5).of(kind("full"))
    assert cost.prefill.seconds(2048, 2048) == pytest.approx(0.002 + 4 * ideal.prefill.seconds(2048, 2048))
    assert cost.decode.seconds(1, 100) == pytest.approx(0.002 + 8 * ideal.decode.seconds(1, 100))


def test_known_models_have_their_parameters(model, tmp_path):
    assert model.layer_weights + 2 * model.head_weights == pytest.approx(8.03e9, rel=1e-3)  # embedding and head
    assert model.active_weights == model.layer_weights
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    mixtral = ModelShape.model_validate(tmp_path / "config.json")
    assert mixtral.layer_weights + 2 * mixtral.head_weights == pytest.approx(46.7e9, rel=1e-3)
    assert mixtral.active_weights + 2 * mixtral.head_weights == pytest.approx(12.9e9, rel=2e-3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no configuration of a model"),
        ("[]", "is no configuration of a model"),
        ("{}", "lacks 'num_hidden_layers'"),
        (json.dumps({key: LLAMA[key] for key in LLAMA if key != "vocab_size"}), "lacks 'vocab_size'"),
        (json.dumps(LLAMA | {"torch_dtype": "int4"}), "dtype 'int4' is not one of float32"),
        (json.dumps(LLAMA | {"num_hidden_layers": 0}), "without a KV cache"),
        (json.dumps(LLAMA | {"kv_lora_rank": 512}), "kv_lora_rank belongs to an architecture"),
    ],
)
def test_what_is_no_known_model_is_refused(tmp_path, content, message):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ModelShapeError, match=message):
        figures(file)
    with pytest.raises(ConfigError, match=message):
        load(flags=[f"simulator.model={file}"], environ={})


def test_a_model_brings_its_kv_shape_and_needs_its_file_no_more(model):
    settings = load(flags=[f"simulator.model={{path: {model.path}, dtype_bytes: 1}}"], environ={})
    shape = settings.simulator.model
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype_bytes) == (32, 8, 128, 1)
    dumped = settings.model_dump(mode="json")
    (model.path / "config.json").unlink()
    assert parse(dumped) == settings
    with pytest.raises(ConfigError, match="cannot read"):
        load(flags=[f"simulator.model={model.path}"], environ={})


def test_a_shape_of_the_kv_cache_is_enough_where_no_step_times_come_from_it(model):
    for flag in ("simulator.model={layers: 3}", "simulator.model.layers=3"):
        shape = load(flags=[flag], environ={}).simulator.model
        assert (shape.layers, shape.kv_heads, shape.is_whole) == (3, TINY["kv_heads"], False)
    assert model.is_whole
    assert load(flags=["simulator.model=null"], environ={}).simulator.model == ModelShape(**TINY)
    assert kv_figures(PATH) | {"dtype_bytes": 4} == TINY


def test_every_gpu_of_the_catalogue_is_one():
    assert {name: Gpu.model_validate(name).name for name in CATALOGUE} == {name: name for name in CATALOGUE}


def test_figures_of_a_gpu_may_be_given():
    gpu = load(flags=["simulator.gpu.name=L4", "simulator.gpu.dollars=0.5"], environ={}).simulator.gpu
    assert (gpu.dollars, gpu.flops) == (0.5, CATALOGUE["L4"]["flops"])
    own = {"name": "mine", "flops": 1e12, "bandwidth": 1e11, "memory": 1e9, "pcie": 1e10}
    assert Gpu.model_validate({**own, "dollars": 1, "as_of": "2026-01-01"}).nvlink is None
    with pytest.raises(ValidationError, match="needs dollars, as_of"):
        Gpu.model_validate(own)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("simulator.gpu=H10", "no GPU 'H10' in the catalogue; did you mean 'H100-SXM'"),
        ("simulator.gpu=H10", "there are A100-SXM, H100-SXM"),
        ("simulator.gpu.dollar=1", "did you mean 'dollars'"),
        ("simulator.gpu.flops=0", "simulator.gpu.flops: Input should be greater than 0"),
        ("simulator.gpu.flops_efficiency=1.1", "less than or equal to 1"),
        ("simulator.model={layers: 3, hidden: 64}", "simulator.model.kv_heads: Field required"),
        (
            "simulator.model={layers: 3, hidden: 64, kv_heads: 1, head_dim: 8, dtype_bytes: 2}",
            "gives a part of hidden, heads, intermediate, vocabulary, but not heads, intermediate, vocabulary",
        ),
    ],
)
def test_faults_in_the_settings_are_told(flag, message):
    with pytest.raises(ConfigError, match=message):
        load(flags=[flag], environ={})

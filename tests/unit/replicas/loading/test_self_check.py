"""A replica whose logits are not the model's does not start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import Driver
from tests.unit.replicas.families import tiny_model
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.replicas.loading import self_check, supported
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.loading.self_check import check_engine, compare, differing, tolerance
from warmkv.replicas.loading.structure import check_config


def driver(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Driver:
    return Driver(prepare(tiny_model(family).to(dtype)), **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "cohere2"])
def test_right_models_pass_in_every_type(family, dtype):
    said: list[str] = []
    checked = driver(family, dtype)
    checked.engine.warm_up()
    check_engine(checked.engine, said.append)
    assert said == ["comparing logits with the model's own forward"]
    assert checked.engine.executor.watch_logits is None
    assert checked.engine.scheduler.step_tokens == 16
    assert not checked.engine.pool.slots


def test_the_check_fits_a_short_context_and_little_memory():
    check_engine(driver(max_context=20).engine)
    small = driver(kv_bytes=1 << 15)
    check_engine(small.engine)  # a prompt of 96 tokens would need more


def tamper_with_decode(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode step forgets its newest key."""
    from warmkv.replicas.slots import slabs

    right = slabs.attend_rows

    def wrong(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return right(query, keys.roll(1, dims=1), values, *rest, **named)

    monkeypatch.setattr(slabs, "attend_rows", wrong)


def tamper_with_chunks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk but the first attends to itself only."""
    right = PrefillState.attend

    def wrong(self: PrefillState, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self.computed:
            self.keys[layer, :, : self.computed] = 0
        return right(self, layer, query, *rest)

    monkeypatch.setattr(PrefillState, "attend", wrong)


@pytest.mark.parametrize("tamper", [tamper_with_decode, tamper_with_chunks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_computes_something_else_is_refused(tamper, dtype, monkeypatch):
    checked = driver(dtype=dtype)
    tamper(checked.engine.model.module, monkeypatch)
    with pytest.raises(RuntimeError, match=r"at position \d+ logits differ .* engine.self_check=false"):
        check_engine(checked.engine)
    assert checked.engine.scheduler.step_tokens == 16


def test_the_first_wrong_position_and_how_wrong_it_is_are_told():
    model = prepare(tiny_model("llama"))
    right = torch.randn(5, 97, generator=torch.Generator().manual_seed(0))
    compare(right + 1e-6, right, model, 1e-4, first=95)
    wrong = right.clone()
    wrong[2] += torch.linspace(-0.5, 0.5, 97)
    with pytest.raises(
        RuntimeError, match=r"at position 97 logits differ .* by 0\.\d+ .*float32 explains 0.0001.*1 of 5"
    ):
        compare(wrong, right, model, 1e-4, first=95)
    wrong[2] = float("nan")
    with pytest.raises(RuntimeError, match="at position 97"):
        compare(wrong, right, model, 1e-4, first=95)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_mixtures_of_experts_pass_where_rounding_chooses_other_experts(dtype):
    """Random weights, large as in no trained model: tokens have experts of almost equal merit in every layer."""
    sizes = {"num_hidden_layers": 12, "num_local_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64}
    model = prepare(tiny_model("gpt_oss", **sizes, layer_types=None, initializer_range=0.5).to(dtype))
    checked = Driver(model).engine
    ids, _, got = self_check._engine_logits(checked)
    expected = self_check.plain_logits(model.module, ids, last=len(got))
    assert differing(got, expected, tolerance(dtype, 12)).all()  # else this test says nothing
    check_engine(checked)


def test_the_check_can_be_turned_off(monkeypatch):
    checked = driver(self_check=False)
    tamper_with_chunks(checked.engine.model.module, monkeypatch)
    check_engine(checked.engine)


@pytest.mark.parametrize("tamper", [tamper_with_decode, tamper_with_chunks])
def test_wrong_mixtures_of_experts_are_refused_in_16_bits(tamper, monkeypatch):
    checked = driver("qwen3_moe", torch.bfloat16)
    tamper(checked.engine.model.module, monkeypatch)
    with pytest.raises(RuntimeError, match=r"engine\.self_check=false"):
        check_engine(checked.engine)


def test_dense_models_are_allowed_no_more_than_their_type_explains(monkeypatch):
    def measured(*_: Any) -> float:
        raise AssertionError("only the choice of experts is swayed by rounding")

    monkeypatch.setattr(self_check, "rounding_error", measured)
    checked = driver("llama", torch.bfloat16)
    tamper_with_decode(checked.engine.model.module, monkeypatch)
    with pytest.raises(RuntimeError, match=r"where torch\.bfloat16 explains 0\.05 "):
        check_engine(checked.engine)


def test_rounding_is_measured_on_the_model_as_it_is():
    module = prepare(tiny_model("llama").to(torch.bfloat16)).module
    ids = list(range(20))
    expected = self_check.plain_logits(module, ids, last=5)
    assert 0 < self_check.rounding_error(module, ids, expected) < 0.1
    assert torch.equal(self_check.plain_logits(module, ids, last=5), expected)  # and nothing is left behind


def test_tolerance_follows_from_type_and_depth():
    assert tolerance(torch.float32, 80) == self_check.LEAST
    assert tolerance(torch.bfloat16, 32) == pytest.approx(12 * 2**-7)
    assert tolerance(torch.float16, 32) == pytest.approx(12 * 2**-10)


def test_a_warm_up_that_fails_stops_the_start(monkeypatch):
    broken = driver()

    def failing(*_: Any) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr(PrefillState, "attend", failing)
    with pytest.raises(RuntimeError, match=r"its warm-up request failed \(ValueError\)"):
        broken.engine.warm_up()


LINEAR = ["linear_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("qwen3_next", {"layer_types": LINEAR}, "recurrent"),
        ("qwen3_5_text", {"layer_types": LINEAR}, "recurrent"),
        ("olmo_hybrid", {"layer_types": LINEAR}, "recurrent"),
        ("minimax", {"layer_types": LINEAR}, "recurrent"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "recurrent"),
        ("deepseek_v3", {}, "latent"),
        ("llama4_text", {}, "chunks"),
        ("hrm_text", {}, "several times"),
        ("doge", {}, "."),
        ("diffllama", {}, "."),
    ],
)
def test_structure_alone_refuses_what_the_table_names(family, changed, reason, monkeypatch):
    monkeypatch.setattr(supported, "REFUSED", {})
    with pytest.raises(ValueError, match=f"of the family {family} cannot be served: .*{reason}"):
        prepare(tiny_model(family, **changed))


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "olmo_hybrid"])
def test_layers_that_do_not_attend_are_found_without_the_configuration(family, monkeypatch):
    """Even where a configuration names its layers in a way that nobody knows."""
    monkeypatch.setattr(supported, "REFUSED", {})
    monkeypatch.setattr("warmkv.replicas.loading.load.check_config", lambda config: None)
    kinds = ["conv", "full_attention", "conv"] if family == "lfm2" else LINEAR
    with pytest.raises(ValueError, match=r"layer 0 \(.*\) does not attend"):
        prepare(tiny_model(family, layer_types=kinds))


def test_a_hybrid_family_without_recurrent_layers_is_served():
    check_config(tiny_model("granitemoehybrid").config)
    check_engine(driver("granitemoehybrid").engine)

"""With `engine.batch_invariant` logits are the same to the last bit in any company, however prompts are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.replicas import families
from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request, random_model
from tests.unit.replicas.engine.test_matrix import POLICIES
from tests.unit.replicas.reference import Reference
from warmkv.config import Config, EngineConfig
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine import batch_invariant
from warmkv.replicas.engine.batch_invariant import ROWS, BatchInvarianceError
from warmkv.replicas.loading.load import LoadedModel, prepare
from warmkv.replicas.loading.packed_weights import PackedLinear
from warmkv.replicas.protocol import GenerateRequest, PromptLogprobs
from warmkv.replicas.slots import kernels, row_tables

PROMPT, NEW = 150, 12
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}  # packed by oneDNN


def wide_model() -> Any:
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_key_value_heads=4, eos_token_id=None, **WIDE)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def served(models) -> dict[str, LoadedModel]:
    wide = prepare(wide_model())
    assert any(isinstance(each, PackedLinear) for each in wide.module.modules())
    return {
        "llama": models["llama"],
        "qwen3": models["qwen3"],
        "bfloat16": prepare(random_model("llama").bfloat16()),
        "wide": wide,
        "gemma2": prepare(families.tiny_model("gemma2")),  # windows, and softmaxes that are capped
        "gemma3": prepare(families.tiny_model("gemma3_text")),  # norms of heads
    }


def tokens(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(VOCABULARY) for _ in range(length)]


def computed(driver: Driver, *requests: GenerateRequest) -> list[Any]:
    """Return the logits that each token of "watched" is drawn from, what it is told, and what is told of its prompt."""
    logits: list[torch.Tensor] = []

    def watch(sequences: Any, drawn_from: torch.Tensor) -> None:
        logits.extend(
            row.clone() for row, each in zip(drawn_from, sequences, strict=True) if each.request.id == "watched"
        )

    driver.engine.executor.watch_logits = watch
    driver.run(*requests)
    told = [each for each in driver.told["watched"] if isinstance(each, PromptLogprobs)]
    return [torch.stack(logits), driver.logprobs("watched"), driver.tokens("watched"), told]


def same(one: list[Any], other: list[Any]) -> bool:
    """Compare logits, which may be shorter where a prompt was told of in another number of parts."""
    prompt, others = ([position for part in each[3] for position in part.logprobs] for each in (one, other))
    return torch.equal(one[0], other[0]) and one[1:3] == other[1:3] and prompt == others


ALONE: dict[Any, list[Any]] = {}


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_answers_depend_on_neither_company_nor_cuts(served, data):
    family = data.draw(st.sampled_from(list(served)))
    wanted = st.sampled_from(["full", *POLICIES])
    policy = data.draw(wanted)
    if PolicySpec.model_validate(policy).name == "streaming_llm" and not served[family].fixed_rotation:
        policy = "full"
    drawn = data.draw(st.sampled_from([{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}]))
    shared, scored = data.draw(st.booleans()), data.draw(st.booleans())
    sampling = {**drawn, "logprobs": 3, **({"prompt_logprobs": 2} if scored else {})}

    def watched() -> GenerateRequest:
        return make_request(tokens(PROMPT, 0), new=NEW, policy=policy, name="watched", **sampling)

    key = family, policy, bool(drawn), scored
    if key not in ALONE:
        alone = Driver(served[family], batch_invariant=True, step_tokens=512, prefix_cache={"enabled": False})
        ALONE[key] = computed(alone, watched())
    others = [
        make_request(
            tokens(PROMPT, 0)[:length] if shared else tokens(length, 1 + at),
            new=data.draw(st.integers(1, 20)),
            policy=data.draw(st.sampled_from(["full", policy])),
            name=str(at),
        )
        for at, length in enumerate(data.draw(st.lists(st.integers(1, PROMPT), max_size=5)))
    ]
    step_tokens = data.draw(st.integers(8, 200))
    busy = Driver(served[family], batch_invariant=True, step_tokens=step_tokens, max_slots=8)
    before = data.draw(st.integers(0, len(others)))
    busy.submit(*others[:before])
    for _ in range(data.draw(st.integers(0, 6))):
        busy.engine.step()
    assert same(computed(busy, watched(), *others[before:]), ALONE[key])


def test_what_is_warm_is_what_was_computed(served):
    settings: dict[str, Any] = {"batch_invariant": True, "max_slots": 8}
    request = make_request(tokens(PROMPT, 0), new=NEW, name="watched")
    cold = computed(Driver(served["wide"], step_tokens=512, **settings), request)
    warm = Driver(served["wide"], step_tokens=29, **settings)
    warm.run(make_request(tokens(PROMPT, 0)[:100], new=2, name="before"), make_request(tokens(40, 9), name="beside"))
    assert same(computed(warm, request), cold)
    assert warm.started("watched").cached_tokens > 0


def test_every_product_has_the_same_rows(models, monkeypatch):
    rows: list[int] = []
    multiply = nn.Linear.forward

    def watched(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.numel() // x.shape[-1])
        return multiply(self, x)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    for invariant, wanted in ((False, None), (True, {ROWS["cpu"]})):
        rows.clear()
        driver = Driver(models["llama"], batch_invariant=invariant, max_slots=8)
        driver.run(*(make_request(tokens(9 * at + 5, at), name=str(at)) for at in range(4)))
        assert (set(rows) == wanted) if invariant else len(set(rows)) > 3
    rows.clear()
    models["llama"].module(torch.zeros(1, 3, dtype=torch.long), use_cache=False, warmkv=Echo())
    assert set(rows) == {3}  # the model is its own again


class Echo:
    def attend(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query


@pytest.mark.parametrize("policy", sorted({PolicySpec.model_validate(each).name: each for each in POLICIES}.values()))
def test_logits_equal_the_slow_reference(models, references, policy):
    prompt, spec = random.Random(0).sample(range(VOCABULARY), 70), PolicySpec.model_validate(policy)
    expected, logits = Reference(references["llama"]).generate(prompt, NEW, budgets.in_force(spec, 70, NEW))
    driver = Driver(models["llama"], batch_invariant=True)
    got = computed(driver, make_request(prompt, new=NEW, policy=policy, name="watched"))
    slack = 2e-4 if spec.storage == "model" else 0.05
    torch.testing.assert_close(got[0], torch.stack(logits), rtol=slack, atol=slack)
    assert got[2] == expected


@pytest.mark.parametrize("policy", ["full", "h2o@8"])
def test_a_sequence_has_launches_of_its_own_where_kernels_attend(models, device, monkeypatch, policy):
    if device.type == "cuda":
        pytest.skip("the models of this test are on the CPU")
    monkeypatch.setattr(row_tables, "SPLIT_ENTRIES", 8)  # so that few entries are split
    request = make_request(tokens(30, 0), new=3, policy=policy, name="watched")
    others = [make_request(tokens(15 * at, at), new=4, policy="snapkv@8:window=2", name=str(at)) for at in (1, 2)]
    alone = computed(Driver(models["llama"], batch_invariant=True, step_tokens=512), request)
    busy = Driver(models["llama"], batch_invariant=True, step_tokens=20)
    laid_out: list[set[int | None]] = []
    attend = kernels.attend

    def watched(batch: row_tables.RowBatch, *given: Any) -> None:
        laid_out.append({int(place) // 2 for place in batch.places})
        attend(batch, *given)

    monkeypatch.setattr(kernels, "attend", watched)
    assert same(computed(busy, others[0], request, others[1]), alone)
    assert {len(sequences) for sequences in laid_out} == {1}
    assert set.union(*laid_out) == {0, 1}  # two decode beside each other


def test_a_replica_does_not_start_where_rows_depend_on_their_place(models, monkeypatch):
    driver = Driver(models["llama"], batch_invariant=True, max_slots=8, step_tokens=64)
    said: list[str] = []
    batch_invariant.check(driver.engine, said.append)
    assert said
    assert driver.engine.scheduler.step_tokens == 64
    mlp = type(models["llama"].module.get_decoder().layers[0].mlp)
    compute = mlp.forward

    def places(self: Any, x: torch.Tensor) -> torch.Tensor:
        return compute(self, x) * torch.linspace(1, 1.01, x.shape[1])[:, None]

    monkeypatch.setattr(mlp, "forward", places)
    driver = Driver(models["llama"], batch_invariant=True, max_slots=8, step_tokens=64)
    with pytest.raises(BatchInvarianceError, match=r"engine\.batch_invariant cannot be had.*1 threads"):
        batch_invariant.check(driver.engine)
    batch_invariant.check(Driver(models["llama"]).engine)  # nobody asked


def test_models_that_mix_experts_are_refused():
    with pytest.raises(BatchInvarianceError, match="Qwen3MoeForCausalLM mixes experts"):
        Driver(prepare(families.tiny_model("qwen3_moe")), batch_invariant=True)


def test_what_it_cannot_be_had_with_is_refused_by_name():
    with pytest.raises(ValueError, match=r"engine\.batch_invariant cannot be had with engine\.compile on"):
        EngineConfig(batch_invariant=True, compile="on")
    with pytest.raises(ValueError, match=r"engine\.batch_invariant cannot be had with prefix_cache\.storage fp8"):
        Config.model_validate({"engine": {"batch_invariant": True}, "prefix_cache": {"storage": "fp8"}})

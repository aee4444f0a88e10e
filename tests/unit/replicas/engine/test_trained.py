"""The trained model through the engine: its attention has structure, so policies really choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.policies.compression.test_cpu_attention import has_kernels
from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.reference import Reference
from warmkv.config import ModelConfig
from warmkv.models.tiny import PATH as TINY
from warmkv.models.tiny import corpus
from warmkv.policies.compression import cpu_attention
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel, load_model
from warmkv.replicas.loading.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(ModelConfig(device="cpu"))


@pytest.fixture(scope="module")
def plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text() -> list[int]:
    tokens: list[int] = load_tokenizer(ModelConfig())(corpus.texts("heldout")[0][:20_000])["input_ids"]
    return tokens


def test_full_cache_equals_transformers_alone_and_in_a_mixed_batch(tiny, plain, text):
    lengths = [1, 64, 333, 700]

    def generate(length: int) -> list[int]:
        with torch.no_grad():
            out = plain.generate(
                torch.tensor([text[:length]]), max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
        return out[0, length:].tolist()

    expected = [generate(length) for length in lengths]
    requests = [make_request(text[:n], new=16, name=str(n), ignore_eos=True) for n in lengths]
    assert [Driver(tiny, step_tokens=128).run(request)[0] for request in requests] == expected
    other = make_request(text[100:500], new=40, name="other", policy="snapkv@50", ignore_eos=True)
    assert Driver(tiny, step_tokens=128, max_slots=3).run(other, *requests)[1:] == expected


@pytest.mark.skipif(not has_kernels, reason="needs g++ and a CPU with AVX-512")
@pytest.mark.parametrize(
    ("policy", "plain"),  # requests whose rows hold entries as they are: no sinks that are rotated
    [("full", 4), ("snapkv@60", 4), ("adakv@60:window=16", 4), ("streaming_llm@60", 1)],
)
def test_answers_are_the_same_through_the_kernels_of_cpus(tiny, text, policy, plain, monkeypatch):
    lengths = [1, 64, 333, 700]
    requests = [make_request(text[:n], new=16, name=str(n), policy=policy, ignore_eos=True) for n in lengths]
    expected = Driver(tiny, step_tokens=128).run(*requests)
    assert cpu_attention.load()
    calls, attend_rows = [], cpu_attention.attend_rows

    def counted(*given):
        calls.append(len(given[7]))
        return attend_rows(*given)

    monkeypatch.setattr(cpu_attention, "attend_rows", counted)
    assert Driver(tiny, step_tokens=128).run(*requests) == expected
    assert max(calls) == plain * tiny.kv_shape.kv_heads  # in slots of several sizes, by one call


# Without knorm: in the first layer a token's key has the same norm wherever it stands, so rounding decides.
@pytest.mark.parametrize(
    "policy",
    [
        "window@60",
        "streaming_llm@60",
        "h2o@60",
        "snapkv@60",
        "snapkv@60+ring+kivi4:window=8",
        "pyramidkv@60:window=16",
        "adakv@60:window=16",
        "tova@60",
        "keydiff@60",
        "expected_attention@60:window=64",
        "fastgen",
        "cake@60:window=16",
        "adaptive@0.6:window=16",
        "h2o@60+protect+turbo4",
        "full+kivi4",
    ],
)
def test_policies_equal_the_slow_reference(tiny, plain, text, policy):
    spec, prompt = PolicySpec.model_validate(policy), text[:160]
    expected, _ = Reference(plain).generate(prompt, 12, spec)
    assert Driver(tiny).run(make_request(prompt, new=12, policy=spec, ignore_eos=True)) == [expected]


@pytest.mark.parametrize("policy", ["full", "snapkv@0.2", "streaming_llm@0.3"])
def test_a_cached_prefix_changes_nothing(tiny, text, policy):
    prompt = text[:300]
    fresh = Driver(tiny, prefix_cache={"enabled": False}).run(make_request(prompt, new=24, policy=policy))
    for cut in (1, 64, 65, 290):
        warm = Driver(tiny)
        warm.run(make_request(prompt[:cut], new=1, marks={cut: "5m"}, name="first"))
        assert warm.run(make_request(prompt, new=24, policy=policy, reads=[cut], name="second")) == fresh

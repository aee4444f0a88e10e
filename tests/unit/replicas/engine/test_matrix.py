"""Every policy through the engine, prefill to last token, against the slow reference: tokens and logits in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.unit.replicas import slow_methods
from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.reference import Reference
from warmkv.policies import budgets
from warmkv.policy_spec import STORAGES, PolicySpec

POLICIES = [
    *slow_methods.cases("SERVED"),
    "cake@20+protect+ring:window=4",
    "h2o@20:heavy=0.25,protect=0.4",
    "tova@20:protect=0.3",
    "keydiff@20+argmin:protect=0.4",
    "snapkv@110+ring+kivi4:window=6,protect=0.2",
    "h2o@120+protect+kivi4",
    "snapkv@16+shots+protect:window=4",
    *(f"full+{name}" for name in STORAGES if name != "model"),
    "snapkv@20+fp8:window=6",
    "snapkv@20+ring+turbo4:window=6",
    "h2o@20+turbo3",
    "tova@20+fp8",
    "streaming_llm@20+turbo4",
    "adakv@24+turbo3:window=6",
    "snapkv@80+kivi4:window=6",
    "snapkv@80+ring+kivi4:window=6",
    "window@75+kivi2",
    "streaming_llm@85+kivi4",
    "h2o@90+kivi4",
    "tova@70+kivi4",
    "snapkv@110+ring+kivi4:window=6,sinks=2,residual=64",
    "adakv@80+kivi4:window=6",
    "fastgen+kivi2:recovery=0.8",
]


def driven(driver: Driver, request: Any) -> tuple[list[int], torch.Tensor]:
    """Return the tokens of a request that runs alone, and the logits each was drawn from."""
    seen: list[torch.Tensor] = []
    draw = driver.engine.executor._draw

    def watched(sequences: Any, logits: torch.Tensor, *given: Any) -> list[int]:
        seen.append(logits[0].clone())
        return draw(sequences, logits, *given)

    driver.engine.executor._draw = watched  # type: ignore[method-assign]
    return driver.run(request)[0], torch.stack(seen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("family", "length", "new"),
    [
        ("llama", 7, 25),
        ("llama", 50, 25),
        ("llama", 120, 80),
        ("llama-mha", 50, 25),
        ("llama-mha", 120, 80),
        pytest.param("llama-mha", 7, 25, marks=pytest.mark.soak(least=0.5)),
    ],
)
def test_tokens_and_logits_equal_the_slow_reference(models, references, family, policy, length, new):
    spec, tokens = PolicySpec.model_validate(policy), prompt(length)
    if length < VOCABULARY:  # equal tokens have keys of equal norm, of which rounding would pick
        tokens = random.Random(length).sample(range(VOCABULARY), length)
    if length == 120 and spec.storage_format.group == 1:  # the long prompt and answer are for what is packed in groups
        if family == "llama-mha":
            pytest.skip("as the shorter prompts")
        new = 16
    expected, expected_logits = Reference(references[family]).generate(tokens, new, budgets.in_force(spec, length, new))
    got, logits = driven(Driver(models[family]), make_request(tokens, new=new, policy=spec))
    # Where numbers are rounded to codes, one that lies between two may go either way.
    slack = 2e-4 if spec.storage == "model" else 0.05
    torch.testing.assert_close(logits, torch.stack(expected_logits), rtol=slack, atol=slack)
    assert got == expected

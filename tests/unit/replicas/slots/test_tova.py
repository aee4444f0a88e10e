"""TOVA through the engine against the paper's own loop: attend first, then drop one token for all heads of a layer."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request
from tests.unit.replicas.engine.test_matrix import driven
from tests.unit.replicas.reference import Reference
from warmkv.policies import budgets
from warmkv.replicas.slots.slots import SlotPool

States = list[tuple[Tensor, Tensor]]  # a multi-state: one (keys, values) of a token, each [kv_heads, d]


def omitted(states: States, queries: Tensor, size: int) -> tuple[Tensor, States]:
    """Attend with the last token's queries [q_heads, d], then keep the `size` states attended to most on average."""
    group = len(queries) // len(states[0][0])
    weights, outputs = [], []
    for member, query in enumerate(queries):
        logits = torch.stack([query @ keys[member // group] for keys, _ in states]) / math.sqrt(len(query))
        weights.append(logits.softmax(0))
        outputs.append(sum(w * values[member // group] for w, (_, values) in zip(weights[-1], states, strict=True)))
    average = (sum(weights) / len(weights)).tolist()
    kept = sorted(range(len(states)), key=lambda state: -average[state])[:size]
    return torch.stack(outputs).flatten(), [states[state] for state in sorted(kept)]


@torch.no_grad()
def published(model: Any, prompt: list[int], new: int, size: int) -> tuple[list[int], list[Tensor]]:
    """Return greedy tokens and their logits under multi-states of `size` tokens."""
    slow, positions = Reference(model), torch.arange(len(prompt))
    hidden, layers = model.model.embed_tokens(torch.tensor(prompt)), []
    for layer in slow.layers:
        q, k, v = slow.project(layer, layer.input_layernorm(hidden))
        q, k = slow.rotate(q, positions), slow.rotate(k, positions)
        hidden = slow.block(layer, hidden, slow.attend(q, k, v, causal=True))
        layers.append(omitted([(k[:, at], v[:, at]) for at in positions], q[:, -1], size)[1])
    logits = [model.lm_head(model.model.norm(hidden[-1]))]
    while len(logits) < new:
        token, at = logits[-1].argmax(), torch.tensor([len(prompt) + len(logits) - 1])
        hidden = model.model.embed_tokens(token[None])
        for number, layer in enumerate(slow.layers):
            q, k, v = slow.project(layer, layer.input_layernorm(hidden))
            states = [*layers[number], (slow.rotate(k, at)[:, 0], v[:, 0])]
            attended, layers[number] = omitted(states, slow.rotate(q, at)[:, 0], size)
            hidden = slow.block(layer, hidden, attended[None])
        logits.append(model.lm_head(model.model.norm(hidden[-1])))
    return [int(step.argmax()) for step in logits], logits


@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3"])
@pytest.mark.parametrize("length", [9, 40])
def test_the_engine_draws_what_the_paper_draws(models, references, family, length):
    """The paper's states are those between two steps: with the token of the step they are one more, the budget."""
    tokens = random.Random(length).sample(range(VOCABULARY), length)
    expected, expected_logits = published(references[family], tokens, 24, size=15)
    got, logits = driven(Driver(models[family]), make_request(tokens, new=24, policy="tova@16"))
    torch.testing.assert_close(logits, torch.stack(expected_logits), rtol=2e-4, atol=2e-4)
    assert got == expected


@pytest.mark.parametrize(
    ("policy", "ragged"),
    [
        ("tova@16", False),
        ("tova@16+turbo4", True),
        ("tova@70+kivi4", False),
        ("tova@70+kivi4", True),
        ("tova@16:per_head=true", False),
    ],
)
def test_all_heads_of_a_layer_hold_the_same_tokens_unless_each_chooses(models, monkeypatch, policy, ragged):
    """Of sequences in one batch, one of which ends early and leaves its rows free; `ragged`: in slabs of one layer."""
    if ragged:
        whole = budgets.layer_budgets
        monkeypatch.setattr(SlotPool, "_growth", lambda pool, needed, *_: needed + 1)  # slabs with an odd row
        monkeypatch.setattr(budgets, "layer_budgets", lambda *given: [n + 40 * i for i, n in enumerate(whole(*given))])
    driver = Driver(models["llama"], max_slots=3)
    driver.submit(
        *(
            make_request([at * seed % VOCABULARY for at in range(150)], new=new, policy=policy, name=str(seed))
            for seed, new in ((2, 200), (3, 7), (5, 200), (7, 200))
        )
    )
    for _ in range(60):
        driver.engine.step()
    heads = driver.engine.pool.shape.kv_heads
    alike = {}
    for slab in driver.engine.pool.slabs:
        for row in range(0, slab.rows, heads):
            if (owner := int(slab.state.owner[row])) >= 0:
                assert (slab.state.owner[row : row + heads] == owner).all()
                ages, scores = slab.memory.ages[:, row : row + heads], slab.memory.scores[:, row : row + heads]
                alike[owner, slab.layers] = bool((ages == ages[:, :1]).all() and (scores == scores[:, :1]).all())
    assert len(alike) == (9 if ragged else 3)
    assert set(alike.values()) == {"per_head" not in policy}

"""The last layer computes what tokens are drawn from, and keys and values of everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import Driver, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.replicas.loading.load import prepare

OFF = {"prefix_cache": {"enabled": False}}
LENGTHS = (90, 50, 3)


def counted(policy: str) -> tuple[list[int], list[list[int]]]:
    """Serve prompts in chunks; returns the rows of every layer's MLP, and the tokens drawn."""
    model = prepare(random_model("llama"))
    rows = [0, 0, 0]
    for at, layer in enumerate(model.module.model.layers):

        def count(module: Any, given: tuple[torch.Tensor], at: int = at) -> None:
            rows[at] += given[0].shape[:2].numel()

        layer.mlp.register_forward_pre_hook(count)
    driver = Driver(model, **OFF, step_tokens=40)
    requests = [make_request(prompt(n, seed=n), new=5, policy=policy, name=str(n)) for n in LENGTHS]
    return rows, driver.run(*requests)


@pytest.mark.parametrize("policy", ["full", "h2o@20", "snapkv@16:window=4"])
def test_rows_of_the_last_layer_are_those_that_tokens_are_drawn_from(policy, monkeypatch):
    rows, tokens = counted(policy)
    every = sum(LENGTHS) + 4 * len(LENGTHS)
    assert rows[:2] == [every, every]
    assert rows[2] < every - 100
    monkeypatch.setattr("warmkv.replicas.engine.forward.eager.LEAST_LEFT_OUT", 1 << 20)
    rows, expected = counted(policy)
    assert rows[2] == every
    assert tokens == expected

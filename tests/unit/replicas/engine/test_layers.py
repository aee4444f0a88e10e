"""Layers that are compiled one by one: families of models draw as without, and those that are alike share code."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.families import VOCABULARY, tiny_model
from warmkv.replicas.engine import model_executor
from warmkv.replicas.engine.forward import CompiledForward, LayeredForward, compiled
from warmkv.replicas.engine.forward.layers import fingerprint
from warmkv.replicas.loading import supported
from warmkv.replicas.loading.load import prepare

FIRST = ("gemma3_text", "gpt_oss", "llama")
"""Families with windows in some layers, sinks, and experts; all others take longer soaks."""
ALL = sorted(supported.SERVED | set(FIRST))


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(model_executor, "compiled", lambda model, device: LayeredForward(model))


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.soak(least=int(name not in FIRST))) for name in ALL if name != "llama"),
    ],
)
def test_layers_of_a_family_compute_as_they_are_and_are_never_built_again(family: str) -> None:
    model = prepare(tiny_model(family), packed=False)
    ids = torch.randint(VOCABULARY, (43,), generator=torch.Generator().manual_seed(1)).tolist()
    requests = [make_request(ids[: 43 - 9 * at], new=6, name=f"{at}", ignore_eos=True) for at in range(3)]
    expected = Driver(model, compile="off").run(*requests)
    driver = Driver(model, compile="on")
    driver.engine.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert driver.run(*requests) == expected
    torch._dynamo.reset()


def test_engines_of_one_process_have_code_of_their_own_and_leave_the_model_as_it_is() -> None:
    models = [prepare(tiny_model("llama"), packed=False) for _ in range(2)]
    with torch.no_grad():
        for weight in models[1].module.parameters():
            weight.mul_(1.3)
    request = make_request(list(range(40)), new=6)
    expected = [Driver(model, compile="off").run(request) for model in models]
    assert expected[0] != expected[1]
    drivers = [Driver(model, compile="on") for model in (*models, models[0])]
    assert [driver.run(request) for driver in drivers] == [*expected, expected[0]]
    assert Driver(models[0], compile="off").run(request) == expected[0]


def test_layers_are_alike_but_for_their_numbers_and_weights() -> None:
    layers = tiny_model("gemma3_text").model.layers
    kinds: dict[Any, set[str]] = {}
    for layer in layers:
        kinds.setdefault(fingerprint(layer), set()).add(str(layer.self_attn.sliding_window))
    assert 1 < len(kinds) <= len(layers)
    assert all(len(windows) == 1 for windows in kinds.values())
    llama = tiny_model("llama").model.layers
    assert len({fingerprint(layer) for layer in llama}) == 1
    llama[1].self_attn.scaling *= 2
    llama[2].mlp.register_forward_hook(lambda *given: None)
    assert len({fingerprint(layer) for layer in llama}) == 3


def test_only_on_a_gpu_are_layers_compiled_one_by_one() -> None:
    model = prepare(tiny_model("llama"), packed=False)
    assert isinstance(compiled(model, torch.device("cuda")), LayeredForward)
    assert isinstance(compiled(model, torch.device("cpu")), CompiledForward)

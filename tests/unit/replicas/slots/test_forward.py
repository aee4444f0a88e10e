"""Compiled passes: the same tokens as eager ones, and nothing is built again while requests come and go."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import Driver, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.config import EngineConfig
from warmkv.replicas.engine import model_executor
from warmkv.replicas.engine.forward import CompiledForward, LayeredForward, compiles
from warmkv.replicas.engine.forward.layers import Layers
from warmkv.replicas.loading import packed_weights
from warmkv.replicas.loading.load import LoadedModel, prepare
from warmkv.replicas.protocol import GenerateRequest

POLICIES = ["full", "snapkv@16:window=4", "h2o@20", "streaming_llm@20", "adakv@16:window=4", "full+kivi4"]


@pytest.fixture(scope="module")
def unpacked() -> LoadedModel:
    model = random_model("llama")
    del model.model.layers[2:]  # two can have budgets of their own; each more takes long to compile
    model.config.num_hidden_layers = 2
    return prepare(model, packed=False)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("aot_eager", CompiledForward), marks=pytest.mark.short, id="aot_eager"),
        pytest.param(("aot_eager", LayeredForward), marks=pytest.mark.short, id="aot_eager-layers"),
        pytest.param(("inductor", CompiledForward), marks=pytest.mark.soak, id="inductor"),
        pytest.param(("inductor", LayeredForward), marks=pytest.mark.soak(least=1), id="inductor-layers"),
    ],
)
def compiled(request: pytest.FixtureRequest, unpacked: LoadedModel) -> Driver:
    """Return an engine with the graphs of the default compiler, or with these as they are: what is built again is the
    same.
    """
    with pytest.MonkeyPatch.context() as patch:
        backend, forward = request.param
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        patch.setattr(model_executor, "compiled", lambda model, device: forward(model))
        driver = Driver(unpacked, compile="on", max_slots=8, step_tokens=40)
    said: list[str] = []
    driver.engine.warm_up(said.append)
    assert said == [
        "compiling, 1 of 3: decoding of one sequence",
        "compiling, 2 of 3: decoding of several sequences",
        "compiling, 3 of 3: prompts",
        "computing a first prompt",
    ]
    return driver


def spied(forward: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of every compiled pass with prompts from now on."""
    passes: list[int] = []
    if isinstance(forward, CompiledForward):
        built = forward._pass
        monkeypatch.setattr(forward, "_pass", lambda *given: passes.append(given[0].shape[1]) or built(*given))
    else:
        run, last = Layers.run, list(forward._layers._by_layer)[-1]

        def watched(layers: Any, layer: Any, given: Any, options: Any) -> Any:
            if id(layer) == last and given[0].shape[1] > 1:
                passes.append(given[0].shape[1])
            return run(layers, layer, given, options)

        monkeypatch.setattr(Layers, "run", watched)
    return passes


@pytest.mark.slow
def test_compiled_passes_draw_what_eager_ones_do_and_are_never_built_again(
    compiled: Driver, unpacked: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests(kind: str) -> list[GenerateRequest]:
        return [
            make_request(prompt(20 + 15 * i, seed=i), new=5 + 7 * i, policy=policy, name=f"{policy} {kind}")
            for i, policy in enumerate(POLICIES)
        ]

    expected = [Driver(unpacked, compile="off").run(request)[0] for request in requests("eager")]
    forward = compiled.engine.executor.forward
    passes = spied(forward, monkeypatch)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled.run(*requests("together")) == expected  # they join one by one, and leave at different lengths
        assert [compiled.run(request)[0] for request in requests("alone")] == expected
    assert sum(passes) > sum(len(request.token_ids) for request in requests("eager"))  # with what decodes beside


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_compiled_layers_and_recorded_steps_draw_what_eager_ones_do_on_a_gpu() -> None:
    model = random_model("llama")
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    loaded = prepare(model.cuda())

    def requests(kind: str) -> list[GenerateRequest]:
        return [
            make_request(prompt(20 + 15 * i, seed=i), new=25 + 7 * i, policy=policy, name=f"{policy} {kind}")
            for i, policy in enumerate(POLICIES)
        ]

    driver = Driver(loaded, max_slots=8, step_tokens=40)
    assert isinstance(driver.engine.executor.forward, LayeredForward)
    driver.engine.warm_up()
    expected = Driver(loaded, compile="off", step_tokens=40).run(*requests("eager"))
    assert driver.run(*requests("together")) == expected
    assert driver.run(*requests("again")) == expected
    assert driver.engine.executor.steps.graphs is not None
    assert driver.engine.executor.steps.graphs.replays > 50
    assert [driver.run(request)[0] for request in requests("alone")] == expected


def test_what_wants_more_logits_than_it_draws_runs_as_it_is(compiled: Driver, unpacked: LoadedModel) -> None:
    request = make_request(prompt(70), new=5, prompt_logprobs=0)
    assert compiled.run(request) == Driver(unpacked, compile="off", step_tokens=40).run(request)


def test_packed_weights_are_multiplied_by_in_compiled_code(
    unpacked: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = random_model("llama")
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    packed = prepare(model)
    called: list[int] = []
    for module in packed.module.modules():
        if isinstance(module, packed_weights.PackedLinear):
            whole = module.multiply
            monkeypatch.setattr(module, "multiply", lambda x, whole=whole: called.append(1) or whole(x))
    driver = Driver(packed, compile="on", max_slots=8, step_tokens=40)
    requests = [make_request(prompt(20 + 30 * i, seed=i), new=5, name=f"{i}") for i in range(3)]
    assert driver.run(*requests) == Driver(unpacked, compile="off", step_tokens=40).run(*requests)
    assert len(called) >= 15  # every linear layer at least once


@pytest.mark.soak
def test_engines_of_one_process_do_not_compute_by_each_others_code(
    unpacked: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile for two models: the guards that would tell them apart are not asked."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(7)
    other = random_model("llama")
    del other.model.layers[2:]
    other.config.num_hidden_layers = 2
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    models = unpacked, prepare(other, packed=False)
    compiled = [Driver(model, compile="on", max_slots=8, step_tokens=40) for model in models]
    requests = [make_request(prompt(20 + 30 * i, seed=i), new=5, name=f"{i}") for i in range(2)]
    answers = [driver.run(*requests) for driver in compiled]
    assert answers[0] != answers[1]
    assert answers == [Driver(model, compile="off", step_tokens=40).run(*requests) for model in models]


def test_automatic_means_on_a_gpu() -> None:
    config = EngineConfig()
    assert compiles(config, torch.device("cuda"))
    assert not compiles(config, torch.device("cpu"))
    assert not compiles(config.model_copy(update={"compile": "off"}), torch.device("cuda"))
    assert compiles(config.model_copy(update={"compile": "on"}), torch.device("cpu"))


@pytest.mark.parametrize("choice", ["auto", "on"])
def test_where_nothing_can_be_compiled_decoding_stays_eager_unless_it_must_not(
    unpacked: LoadedModel, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    def failing(self: CompiledForward) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CompiledForward, "build", failing)  # a machine without a compiler
    monkeypatch.setattr(model_executor, "compiles", lambda config, device: config.compile != "off")  # as on a GPU
    driver = Driver(unpacked, compile=choice)
    if choice == "on":
        with pytest.raises(RuntimeError, match="no compiler"):
            driver.engine.warm_up()
        return
    driver.engine.warm_up()
    request = make_request(prompt(30), new=10)
    assert driver.run(request) == Driver(unpacked, compile="off").run(request)

"""Decode steps that fail half way and are repeated in parts: who survives draws what it would have drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.replicas.loading.last_layer import DrawnOnly
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import Failed, GenerateRequest
from warmkv.replicas.slots import slabs

# Every decode rule with every kind of storage; the groups of 32 entries leave their tails within NEW tokens.
POLICIES = [
    "full",
    "full+fp8",
    "full+kivi4",
    "full+turbo3",
    "streaming_llm@20",
    "streaming_llm@80+kivi4",
    "snapkv@20+ring:window=6",
    "h2o@20",
    "h2o@80+kivi4",
    "tova@16",
    "rocketkv@8:window=4",
    "pyramidkv@20:window=4",
]
NEW = 80
Place = Literal["before", "inside", "after", "draw"]
PLACES: list[Place] = ["before", "inside", "after", "draw"]


def crowd(policies: tuple[str, ...]) -> list[GenerateRequest]:
    """Return requests of these policies, of which some draw at random."""
    return [
        make_request(
            prompt(40 + at, seed=at), new=NEW, policy=policy, name=str(at), seed=at, temperature=0.8 * (at % 2)
        )
        for at, policy in enumerate(policies)
    ]


def crowded(model: LoadedModel) -> Driver:
    return Driver(model, prefix_cache={"enabled": False}, step_tokens=64)


@cache
def undisturbed(policies: tuple[str, ...]) -> list[list[int]]:
    return crowded(MODELS["llama"]).run(*crowd(policies))


MODELS: dict[str, LoadedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def _models(models: dict[str, LoadedModel]) -> None:
    MODELS.update(models)


class Fault:
    """Makes steps of an engine fail in a layer: before it, inside its attention, after it, or when tokens are drawn.

    `hits` tells which, from the number of the step and the requests in its batch.
    """

    def __init__(self, engine: Any, place: Place, layer: int, hits: Any) -> None:
        self.engine, self.place, self.layer, self.hits = engine, place, layer, hits
        self.tries: list[set[str]] = []
        self.armed = self.inside = False
        self._forward, self._draw = engine.executor.forward, engine.executor._draw
        engine.executor.forward, engine.executor._draw = self.forward, self.draw

    def forward(self, ids: Any, positions: Any, state: Any) -> Any:
        if isinstance(state, DrawnOnly):
            return self._forward(ids, positions, state)
        decoding = self.engine.scheduler.decoding
        batch = {decoding[slot].request.id for slot in state.slots if slot in decoding}
        self.tries.append(batch)
        self.armed = bool(batch) and self.hits(len(self.tries), batch)
        self.state = state
        return self._forward(ids, positions, self)

    def attend(self, layer: int, *given: Any) -> Any:
        here = self.armed and layer == self.layer
        if here and self.place == "before":
            raise ValueError("it fails before a layer")
        self.inside = here and self.place == "inside"
        out = self.state.attend(layer, *given)
        self.inside = False
        if here and self.place == "after":
            raise ValueError("it fails after a layer")
        return out

    def draw(self, sequences: Any, logits: Any, *given: Any) -> Any:
        drawn = self._draw(sequences, logits, *given)
        if self.armed and self.place == "draw":
            self.armed = False
            raise ValueError("it fails when tokens are drawn")
        return drawn


@contextmanager
def failing_inside(fault: Fault) -> Iterator[None]:
    """Let attention fail after the new tokens are written, before what they receive is counted."""
    names = ("attend_rows", "attend_packed", "attend_segments")
    own = {name: getattr(slabs, name) for name in names}

    def wrapped(name: str) -> Any:
        def attend(*given: Any, **more: Any) -> Any:
            if fault.inside:
                raise ValueError("it fails inside attention")
            return own[name](*given, **more)

        return attend

    for name in names:
        setattr(slabs, name, wrapped(name))
    try:
        yield
    finally:
        for name in names:
            setattr(slabs, name, own[name])


@settings(max_examples=6)
@given(
    policies=st.lists(st.sampled_from(POLICIES), min_size=2, max_size=3).map(tuple),
    place=st.sampled_from(PLACES),
    layer=st.integers(0, 2),
    steps=st.sets(st.integers(1, NEW // 10), min_size=1),
)
def test_a_fault_that_passes_changes_nothing(policies, place, layer, steps):
    driver = crowded(MODELS["llama"])
    fault = Fault(driver.engine, place, layer, lambda number, batch: number % 10 == 0 and number // 10 in steps)
    with failing_inside(fault):
        assert driver.run(*crowd(policies)) == undisturbed(policies)


@settings(max_examples=6)
@given(
    policies=st.lists(st.sampled_from(POLICIES), min_size=2, max_size=4).map(tuple),
    place=st.sampled_from(PLACES),
    layer=st.integers(0, 2),
    culprits=st.sets(st.integers(0, 4), min_size=1, max_size=2),
    begin=st.integers(1, NEW - 2),
)
def test_who_a_step_fails_with_ends_alone_and_the_others_draw_what_they_would_have(
    policies, place, layer, culprits, begin
):
    bad = {str(at) for at in culprits if at < len(policies)} - {"0"}
    driver = crowded(MODELS["llama"])

    def hits(number: int, batch: set[str]) -> bool:
        return any(len(driver.tokens(name)) >= begin for name in batch & bad)

    fault = Fault(driver.engine, place, layer, hits)
    with failing_inside(fault):
        driver.run(*crowd(policies))
    expected = undisturbed(policies)
    for at in range(len(policies)):
        name, last = str(at), driver.told[str(at)][-1]
        if name in bad:
            assert last == Failed("ValueError", "request")
            assert driver.tokens(name) == expected[at][:begin]
        else:
            assert driver.tokens(name) == expected[at]
    assert all(slab.is_empty for slab in driver.engine.pool.slabs)
    assert driver.engine.stats().failures["request"] == len(bad)


@pytest.mark.parametrize("policy", POLICIES)
def test_when_memory_runs_out_the_youngest_leave_and_the_others_go_on(models, policy):
    policies = (policy,) * 4
    driver = crowded(models["llama"])
    requests = crowd(policies)
    for request in requests:
        driver.submit(request)
        driver.engine._clock = lambda request=request: float(request.id)  # so they arrive one after the other
    driver.submit()

    def too_large(number: int, batch: set[str]) -> bool:
        return len(batch) > 2 and all(len(driver.tokens(name)) > 50 for name in batch)

    fault = Fault(driver.engine, "before", 1, too_large)
    original = fault.attend

    def attend(layer: int, *given: Any) -> Any:
        try:
            return original(layer, *given)
        except ValueError:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB") from None

    fault.attend = attend  # type: ignore[method-assign]
    driver.run()
    left = [name for name in "0123" if isinstance(driver.told[name][-1], Failed)]
    assert left == ["2", "3"]
    assert {driver.told[name][-1] for name in left} == {Failed("OutOfMemoryError", "replica")}
    expected = undisturbed(policies)
    assert [driver.tokens(name) for name in "01"] == expected[:2]
    assert driver.engine.stats().failures == {"request": 0, "memory": 2, "device": 0}


@pytest.mark.parametrize("place", ["_counted", "_put"])
@pytest.mark.parametrize("policy", ["full+kivi4", "streaming_llm@80+kivi4", "h2o@80+kivi4"])
def test_a_pack_that_runs_out_of_memory_half_way_goes_on_in_the_layer_it_had_come_to(
    models, policy, place, monkeypatch
):
    expected, layers, puts = undisturbed((policy, policy)), list[int](), [0]
    counted, put = slabs.Slab._counted, slabs._put

    def run_out(here: str) -> None:
        if place == here and layers[-2:] == [0, 1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def counting(self: slabs.Slab, at: slice, *given: Any) -> Any:
        layers.append(at.start)
        puts[0] = 0
        run_out("_counted")
        return counted(self, at, *given)

    def putting(*given: Any) -> None:
        puts[0] += 1
        if puts[0] == 2:  # keys are in place, values are not
            run_out("_put")
        put(*given)

    monkeypatch.setattr(slabs, "PACKED_AT_ONCE", 1)  # a layer at a time
    monkeypatch.setattr(slabs.Slab, "_counted", counting)
    monkeypatch.setattr(slabs, "_put", putting)
    driver = crowded(models["llama"])
    assert driver.run(*crowd((policy, policy))) == expected
    assert layers
    assert layers == [0, 1, 1, 2] * (len(layers) // 4)
    assert driver.engine.stats().failures == {"request": 0, "memory": 0, "device": 0}

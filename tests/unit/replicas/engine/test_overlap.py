"""Steps that are launched before the tokens of those before are read: the same answers, a step later."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replicas.conftest import Driver, make_request, replace_eos
from tests.unit.replicas.engine import test_repeated_steps as repeated
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_graphs import crowd as in_pages
from tests.unit.replicas.engine.test_graphs import plain, poisoned, quick, recorded
from tests.unit.replicas.engine.test_preemption import Clock, of
from tests.unit.replicas.engine.test_preemption import crowd as crowded_tenants
from tests.unit.replicas.recording import CpuRecorder
from warmkv.replicas.engine import overlap
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import Failed, Finished, GenerateRequest

__all__ = ["poisoned", "quick"]
OFF = {"prefix_cache": {"enabled": False}}
MODELS: dict[str, LoadedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def _models(models: dict[str, LoadedModel]) -> None:
    MODELS.update(models)
    repeated.MODELS.update(models)


def overlapped(driver: Driver) -> Driver:
    driver.engine.overlap()
    return driver


def steps_on_top(driver: Driver) -> int:
    assert driver.engine._overlap is not None
    return driver.engine._overlap.launched


POLICIES = ["full", "h2o@20", "streaming_llm@20", "full+kivi4", "snapkv@16:window=4"]
SAMPLING = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.1, "top_p": 0.8},
    {"stop_token_ids": (3, 14, 15, 92)},
    {"min_tokens": 6},
    {"repetition_penalty": 1.4, "temperature": 0.7},
    {"logprobs": 2},
]


@st.composite
def crowds(draw: st.DrawFn) -> list[tuple[int, GenerateRequest]]:
    """Return requests with the step before which each comes."""
    found = []
    for at in range(draw(st.integers(1, 6))):
        sampling = draw(st.sampled_from(SAMPLING[: draw(st.sampled_from([5, 5, 8]))]))
        request = make_request(
            prompt(draw(st.integers(1, 50)), seed=at),
            new=draw(st.integers(1, 24)),
            policy=draw(st.sampled_from(POLICIES)),
            name=str(at),
            seed=at,
            **sampling,
        )
        found.append((draw(st.integers(0, 20)), request))
    return found


def serve(driver: Driver, crowd: list[tuple[int, GenerateRequest]]) -> dict[str, list[Any]]:
    for step in range(max(at for at, _ in crowd) + 1):
        driver.submit(*(request for at, request in crowd if at == step))
        driver.engine.step()
    driver.run()
    return {name: [event for event in told if not hasattr(event, "replica")] for name, told in driver.told.items()}


@settings(max_examples=20)
@given(crowds(), st.sampled_from([None, 12, 40]))
def test_everybody_is_told_what_it_is_told_by_steps_one_after_the_other(crowd: Any, ends: int | None) -> None:
    """Compare tokens, log-probabilities, reasons and counts; a token that many draw ends answers."""
    model = MODELS["llama"] if ends is None else replace_eos(MODELS["llama"], ends)
    expected = serve(Driver(model, **OFF, step_tokens=40), crowd)
    driver = overlapped(Driver(model, **OFF, step_tokens=40))
    assert serve(driver, crowd) == expected
    assert not driver.engine.pool.slots
    assert driver.engine._overlap is not None
    assert not driver.engine._overlap.in_flight


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events, begin_read = list[str](), overlap.begin_read

    def noted(tokens: torch.Tensor) -> Any:
        number = sum(event.startswith("launch") for event in events)
        events.append(f"launch {number}")
        read = begin_read(tokens)

        def reading() -> list[int]:
            events.append(f"read {number}")
            return read()

        return reading

    monkeypatch.setattr(overlap, "begin_read", noted)
    driver = overlapped(Driver(MODELS["llama"], **OFF))
    launch = driver.engine._overlap.launch  # type: ignore[union-attr]

    def launching(*given: Any) -> torch.Tensor:
        with monkeypatch.context() as patch:  # nothing waits for the device meanwhile
            for name in ("tolist", "item", "__bool__"):
                patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a launch reads numbers back"))
            return launch(*given)

    driver.engine._overlap.launch = launching  # type: ignore[union-attr]
    requests = [make_request(prompt(9, seed=at), new=8, name=str(at), seed=at, temperature=at) for at in range(2)]
    driver.run(*requests)
    pairs = [event for n in range(1, 7) for event in (f"launch {n}", f"read {n - 1}")]
    assert events == ["launch 0", *pairs, "read 6"]
    assert steps_on_top(driver) == 6


def test_recorded_steps_feed_each_other_on_the_device(models: Any, quick: CpuRecorder, poisoned: None) -> None:
    requests = in_pages(24, random.Random(5))
    driver = overlapped(recorded(models["llama"], quick, max_slots=6, max_queue=24, step_tokens=64))
    assert driver.run(*requests) == plain(models["llama"], *requests)
    assert driver.engine.executor.steps.graphs is not None
    assert driver.engine.executor.steps.graphs.replays > 24
    assert steps_on_top(driver) > 24


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=5), st.integers(0, 99))
def test_who_is_cancelled_leaves_nothing_and_the_others_go_on(cancelled: Any, seed: int) -> None:
    """Stop strings end answers so: who is cancelled has a part of its answer, and frees its slot at once."""
    requests = [
        make_request(prompt(20 + at, seed=at), new=20, policy=POLICIES[at], name=str(at), seed=seed, temperature=at / 4)
        for at in range(5)
    ]
    expected = Driver(MODELS["llama"], **OFF, step_tokens=64).run(*requests)
    driver, gone = overlapped(Driver(MODELS["llama"], **OFF, step_tokens=64)), set[int]()
    driver.submit(*requests)
    for step in range(31):
        for at, who in cancelled:
            if at == step:
                driver.engine.cancel(str(who))
        driver.engine.step()
    driver.run()
    for at, whole in enumerate(expected):
        drawn, last = driver.tokens(str(at)), driver.finished(str(at))
        if last.reason == "cancelled":
            gone.add(at)
            assert drawn == whole[: len(drawn)]
        else:
            assert (drawn, last) == (whole, Finished("length", 20))
    assert gone <= {who for _, who in cancelled}
    assert not driver.engine.pool.slots


@pytest.mark.parametrize(
    "more",
    [{"repetition_penalty": 1.3}, {"logprobs": 0}, {"min_tokens": 12}, {"logit_bias": ((4, 2.0),)}],
    ids=str,
)
def test_where_the_host_has_to_see_tokens_steps_follow_each_other(more: dict[str, Any]) -> None:
    driver = overlapped(Driver(MODELS["llama"], **OFF))
    driver.run(make_request(prompt(9), new=12, **more))
    assert steps_on_top(driver) == 0


def test_an_answer_that_is_resumed_overlaps_behind_what_was_drawn_elsewhere() -> None:
    request = make_request(prompt(20), new=16, policy="h2o@12", seed=3, temperature=0.9)
    (whole,) = Driver(MODELS["llama"], **OFF).run(request)
    driver = overlapped(Driver(MODELS["llama"], **OFF))
    assert driver.run(dataclasses.replace(request, resume=tuple(whole[:9]))) == [whole]
    assert 0 < steps_on_top(driver) < 9


def test_a_row_that_is_no_number_ends_alone() -> None:
    requests = [make_request(prompt(12, seed=at), new=14, name=str(at)) for at in range(3)]
    expected = Driver(MODELS["llama"], **OFF, step_tokens=64).run(*requests)
    driver = overlapped(Driver(MODELS["llama"], **OFF, step_tokens=64))
    forward, steps = driver.engine.executor.forward, 0

    def spoiled(ids: torch.Tensor, positions: torch.Tensor, state: Any) -> torch.Tensor:
        nonlocal steps
        logits = forward(ids, positions, state).clone()
        steps += ids.shape[1] == 1
        if ids.shape[1] == 1 and steps == 6:
            logits[1] = float("nan")
        return logits

    driver.engine.executor.forward = spoiled  # type: ignore[assignment]
    driver.run(*requests)
    assert [driver.tokens("0"), driver.tokens("2")] == [expected[0], expected[2]]
    assert driver.tokens("1") == expected[1][:6]
    assert driver.told["1"][-1] == Failed("the model gave logits that are not finite", "request")


@settings(max_examples=6)
@given(
    policies=st.lists(st.sampled_from(repeated.POLICIES), min_size=2, max_size=3).map(tuple),
    place=st.sampled_from(repeated.PLACES[:3]),
    layer=st.integers(0, 2),
    steps=st.sets(st.integers(1, repeated.NEW // 10), min_size=1),
)
def test_a_launch_that_fails_once_changes_nothing(policies: Any, place: Any, layer: int, steps: set[int]) -> None:
    driver = overlapped(repeated.crowded(MODELS["llama"]))
    fault = repeated.Fault(
        driver.engine, place, layer, lambda number, batch: number % 10 == 0 and number // 10 in steps
    )
    with repeated.failing_inside(fault):
        assert driver.run(*repeated.crowd(policies)) == repeated.undisturbed(policies)
    assert steps_on_top(driver) > repeated.NEW // 2


@settings(max_examples=6)
@given(
    policies=st.lists(st.sampled_from(repeated.POLICIES), min_size=2, max_size=4).map(tuple),
    place=st.sampled_from(repeated.PLACES[:3]),
    layer=st.integers(0, 2),
    culprit=st.integers(1, 3),
    begin=st.integers(1, repeated.NEW - 2),
)
def test_who_a_launch_fails_with_ends_alone(policies: Any, place: Any, layer: int, culprit: int, begin: int) -> None:
    bad = str(min(culprit, len(policies) - 1))
    driver = overlapped(repeated.crowded(MODELS["llama"]))
    fault = repeated.Fault(
        driver.engine, place, layer, lambda number, batch: bad in batch and len(driver.tokens(bad)) >= begin
    )
    with repeated.failing_inside(fault):
        driver.run(*repeated.crowd(policies))
    for at, whole in enumerate(repeated.undisturbed(policies)):
        if str(at) == bad:
            assert driver.told[bad][-1] == Failed("ValueError", "request")
            assert driver.tokens(bad) == whole[: len(driver.tokens(bad))]
            assert len(driver.tokens(bad)) - begin in (0, 1)  # those drawn when it fails are delivered
        else:
            assert driver.tokens(str(at)) == whole
    assert all(slab.is_empty for slab in driver.engine.pool.slabs)


def test_who_is_set_aside_has_all_its_tokens() -> None:
    greedy, modest = [of("greedy", seed, new=60) for seed in range(5)], of("modest", 9, new=6)
    expected = Driver(MODELS["llama"], max_slots=6).run(*greedy, modest)
    driver = overlapped(Driver(MODELS["llama"], clock=Clock(), max_slots=5, preempt_seconds=30.0))
    crowded_tenants(driver, greedy)
    driver.submit(modest)
    driver.run()
    assert driver.engine.scheduler.preempted
    assert steps_on_top(driver) > 10
    assert [driver.tokens(each.id) for each in [*greedy, modest]] == expected


def test_an_engine_that_stops_tells_those_in_flight() -> None:
    driver = overlapped(Driver(MODELS["llama"], **OFF))
    driver.submit(make_request(prompt(9), new=200))
    while not driver.tokens("request"):
        driver.engine.step()
    driver.engine.step()
    driver.engine.stop()
    driver.engine.run()
    assert driver.told["request"][-1] == Failed("the replica is stopping")


def test_only_a_gpu_overlaps_by_itself() -> None:
    assert Driver(MODELS["llama"]).engine._overlap is None

"""Mixed batches: one pass a step within its tokens, and nobody's result depends on whom it shares a pass with."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.polling import PATIENCE
from tests.unit.replicas import families
from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.policies import budgets
from warmkv.policies.batching import LONGEST_STEP, PASSES
from warmkv.policies.compression.observe import compute_prompt
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.slot_sizes import slot_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.registry import METHODS
from warmkv.replicas.loading.load import LoadedModel, prepare
from warmkv.replicas.protocol import Failed, GenerateRequest

OFF = {"prefix_cache": {"enabled": False}}
SPECS = [
    PolicySpec(name=name, budget=20) if method.has_budget else PolicySpec(name=name) for name, method in METHODS.items()
]


def passes(driver: Driver) -> list[int]:
    """Return the tokens of every pass from now on."""
    engine, counted = driver.engine, list[int]()
    forward = engine.executor.forward

    def counting(ids: torch.Tensor, *given: Any) -> torch.Tensor:
        counted.append(ids.numel())
        return forward(ids, *given)

    engine.executor.forward = counting  # type: ignore[assignment,method-assign]
    return counted


def steps(driver: Driver) -> int:
    count = 0
    while driver.engine.step():
        count += 1
    return count


def test_a_step_is_one_pass_within_its_tokens(driver):
    busy = driver(**OFF, step_tokens=24, max_slots=8)
    counted = passes(busy)
    busy.submit(*(make_request(prompt(10 + 9 * i), new=12, name=str(i)) for i in range(8)))
    assert steps(busy) == len(counted)
    assert max(counted) == 24
    assert sum(counted) == sum(10 + 9 * i + 11 for i in range(8))
    assert len(counted) < sum(10 + 9 * i for i in range(8)) / 24 + 16  # prompts are packed, not one by one


def test_decoding_sequences_draw_a_token_in_every_step(driver):
    busy = driver(**OFF)
    busy.submit(make_request(prompt(5), new=30, name="decodes"))
    busy.engine.step()
    busy.submit(*(make_request(prompt(100 + i), new=2, name=str(i)) for i in range(4)))
    for drawn in range(2, 30):
        busy.engine.step()
        assert len(busy.tokens("decodes")) == drawn


def test_decoding_waits_for_fewer_tokens_of_a_prompt_the_more_keys_they_attend_to(driver):
    busy = driver(**OFF, step_tokens=40, keys_per_token=20.0)
    counted = passes(busy)
    busy.submit(make_request(prompt(5), new=120, name="decodes"))
    busy.engine.step()
    busy.submit(make_request(prompt(400), new=2, name="long"))
    at = 0
    while not busy.tokens("long"):
        busy.engine.step()
        chunk = counted[-1] - 1  # beside the token of the sequence that decodes
        assert chunk == min(400 - at, int(39 / max(1, (1 + at / 20) / LONGEST_STEP)))
        at += chunk
    assert at == 400
    assert len(counted) > 20
    alone = driver(**OFF, step_tokens=40, keys_per_token=20.0)
    counted = passes(alone)
    alone.run(make_request(prompt(400), new=2, name="long"))
    assert counted == [40] * 10 + [1]  # nobody waits


def test_a_short_prompt_behind_long_ones_is_computed_at_once(driver):
    busy = driver(**OFF, step_tokens=32)
    busy.submit(*(make_request(prompt(400, seed=i), new=2, name=f"long{i}") for i in range(3)))
    busy.engine.step()
    busy.submit(make_request(prompt(20), new=4, name="short"))
    busy.engine.step()
    assert len(busy.tokens("short")) == 1
    assert not busy.told["long0"]


def test_a_long_prompt_ends_while_short_ones_keep_coming(driver):
    busy = driver(**OFF, step_tokens=32)
    busy.submit(make_request(prompt(400), new=1, name="long"))
    for number in range(4 * 400 // 32 + 1):
        busy.submit(*(make_request(prompt(16, seed=2 * number + i), new=1, name=f"{number}/{i}") for i in range(2)))
        busy.engine.step()
    assert len(busy.tokens("long")) == 1


def test_what_does_not_fit_is_passed_a_bounded_number_of_times(driver, models):
    shape, full = models["llama"].kv_shape, PolicySpec()
    holds, large = (slot_bytes(full, shape, 100, new) for new in (390, 2))
    busy = driver(**OFF, step_tokens=400, max_slots=20, kv_bytes=holds + large + 100 * shape.token_bytes)
    busy.submit(make_request(prompt(100), new=390, name="holds"))
    busy.engine.step()
    busy.submit(make_request(prompt(100, seed=1), new=200, name="large"))
    busy.submit(*(make_request(prompt(9, seed=i), new=1, name=f"small{i}") for i in range(2 * PASSES)))
    busy.engine.step()
    (waiting, *others) = busy.engine.scheduler.waiting
    assert (waiting.request.id, waiting.passed) == ("large", PASSES)
    assert len(others) == PASSES
    steps(busy)
    assert len(busy.tokens("large")) == 200
    assert all(len(busy.tokens(f"small{i}")) == 1 for i in range(2 * PASSES))


def test_a_prompt_that_waits_for_files_lets_others_pass(models, tmp_path):
    size = 8 * models["llama"].kv_shape.token_bytes
    cache = {"memory_bytes": 8 * size, "disk": {"memory_bytes": 100 * (size + 4096), "path": tmp_path}}
    busy = Driver(models["llama"], prefix_cache=cache)
    tokens = prompt(61)
    expected = busy.run(make_request(tokens, new=3, name="first"))
    for seed in range(3):
        busy.run(make_request(prompt(40, seed=seed), new=1, name=f"fills{seed}"))
    while busy.engine.store.moving:
        busy.engine._inbox.wait(PATIENCE)
        busy.engine.store.settle()
    gate = threading.Event()
    busy.engine.store._jobs.threads.submit("read", lambda: gate.wait(PATIENCE))
    busy.submit(make_request(tokens, new=3, name="waits"), make_request(prompt(30), new=3, name="passes"))
    for _ in range(4):
        busy.engine.step()
    assert len(busy.tokens("passes")) == 3
    assert busy.told["waits"] == []
    gate.set()
    busy.run()
    assert [busy.tokens("waits")] == expected
    assert busy.started("waits").tiers["disk"] > 0


def test_prompts_of_a_tenant_with_many_let_those_of_others_in(driver):
    busy = driver(**OFF, step_tokens=16)
    busy.submit(*(dataclasses.replace(make_request(prompt(60, seed=i), name=f"a{i}"), tenant="a") for i in range(8)))
    for _ in range(5):
        busy.engine.step()
    busy.submit(dataclasses.replace(make_request(prompt(60, seed=9), name="b"), tenant="b"))
    while not busy.tokens("b"):
        busy.engine.step()
    assert sum(bool(busy.tokens(f"a{i}")) for i in range(8)) <= 3


# --- whoever shares a pass


def handed_off(driver: Driver) -> dict[str, tuple[PrefillState, Any]]:
    """Return the computed prompt and the selection of every request, by id."""
    engine, found = driver.engine, {}
    fill = engine.pool.fill

    def noting(slot: Any, state: PrefillState, selections: Any, stored: Any) -> int:
        (name,) = [each.request.id for each in engine.scheduler.prefilling if each.slot is slot]
        found[name] = state, selections
        return fill(slot, state, selections, stored)

    engine.pool.fill = noting  # type: ignore[method-assign]
    return found


@st.composite
def crowds(draw: st.DrawFn) -> list[tuple[int, GenerateRequest]]:
    """Return requests with the step before which each comes."""
    found = []
    for at in range(draw(st.integers(2, 6))):
        spec, length = draw(st.sampled_from(SPECS)), draw(st.integers(1, 70))
        tokens = random.Random(f"{at}/{length}").sample(range(VOCABULARY), length)  # no ties among keys
        request = make_request(tokens, new=draw(st.integers(2, 6)), policy=spec, name=str(at))
        found.append((draw(st.integers(0, 6)), request))
    return found


def serve(driver: Driver, crowd: Sequence[tuple[int, GenerateRequest]]) -> None:
    for step in range(max(at for at, _ in crowd) + 1):
        driver.submit(*(request for at, request in crowd if at == step))
        driver.engine.step()
    driver.run()


MODELS: dict[str, LoadedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def _models(models: dict[str, LoadedModel]) -> None:
    MODELS.update(models)


@settings(max_examples=25)
@given(crowds(), st.sampled_from([16, 17, 40, 200]))
def test_prompts_cut_anywhere_in_any_company_are_what_they_are_alone(crowd, budget):
    """Keys, observed queries, column sums and kept positions equal those of the prompt as one chunk by itself."""
    driver = Driver(MODELS["llama"], **OFF, step_tokens=budget, max_slots=16)
    found = handed_off(driver)
    serve(driver, crowd)
    for _, request in crowd:
        spec = budgets.in_force(request.policy, len(request.token_ids), request.sampling.max_tokens)
        alone = compute_prompt(random_model("llama"), list(request.token_ids), spec, chunk=1 << 20)
        state, selections = found[request.id]
        for name in ("keys", "values", "queries", "column_sums"):
            ours, theirs = getattr(state, name), getattr(alone, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(selections, spec.method.select(alone), strict=True):
            assert torch.equal(ours.positions, theirs.positions)
        (tokens,) = Driver(MODELS["llama"], **OFF, step_tokens=1000).run(request)
        assert driver.tokens(request.id) == tokens


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "qwen3_moe", "phi3"])
def test_windows_caps_sinks_and_experts_keep_to_their_own_sequence(family):
    """Prompts beyond the window, cut at other places than alone, beside sequences that decode."""
    model = prepare(families.tiny_model(family))
    crowd = [(at, make_request(prompt(30 + 7 * at, seed=at), new=8, name=str(at))) for at in range(4)]
    driver = Driver(model, **OFF, step_tokens=21)
    serve(driver, crowd)
    module = families.tiny_model(family)
    for _, request in crowd:
        tokens = list(request.token_ids)
        for drawn in driver.tokens(request.id):
            with torch.no_grad():
                assert drawn == int(module(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            tokens.append(drawn)


# --- failures


@pytest.mark.parametrize("policy", ["full", "h2o@20", "fastgen"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_pass_that_fails_once_changes_nothing(models, policy, layer):
    """What a layer did before the failure, column sums and slots, is not done again."""
    requests = [make_request(prompt(50 + at, seed=at), new=12, policy=policy, name=str(at)) for at in range(4)]
    expected = Driver(models["llama"], **OFF, step_tokens=40).run(*requests)
    driver = Driver(models["llama"], **OFF, step_tokens=40)
    calls: list[int] = []

    def failing(attend: Any) -> Any:
        def attended(self: PrefillState, at: int, *given: Any) -> torch.Tensor:
            out: torch.Tensor = attend(self, at, *given)
            if at == layer:
                calls.append(1)
                if len(calls) % 4 == 3:
                    raise ValueError("it fails behind a layer")
            return out

        return attended

    with pytest.MonkeyPatch.context() as patch:
        for name in ("attend", "attend_drawn"):
            patch.setattr(PrefillState, name, failing(getattr(PrefillState, name)))
        assert driver.run(*requests) == expected
    assert len(calls) > 8
    assert driver.engine.stats().failures == {"request": 0, "memory": 0, "device": 0}


@pytest.mark.parametrize("error", [ValueError("bad"), torch.OutOfMemoryError("CUDA out of memory")])
def test_who_a_pass_fails_with_ends_alone(models, error):
    requests = [
        make_request(prompt(30, seed=at), new=12, policy=("full", "h2o@20")[at % 2], name=str(at)) for at in range(4)
    ]
    bad = make_request([96, *prompt(30, seed=9)], new=12, name="bad")
    clean = [dataclasses.replace(each, token_ids=tuple(token % 96 for token in each.token_ids)) for each in requests]
    expected = Driver(models["llama"], **OFF).run(*clean)
    driver = Driver(models["llama"], **OFF, step_tokens=40)
    forward = driver.engine.executor.forward

    def failing(ids: torch.Tensor, *given: Any) -> torch.Tensor:
        if ids.shape[1] > 1 and bool((ids == 96).any()):
            raise error
        return forward(ids, *given)

    driver.engine.executor.forward = failing  # type: ignore[method-assign,assignment]
    driver.submit(*clean[:2])
    driver.engine.step()
    driver.submit(bad, *clean[2:])
    driver.run()
    fault = "replica" if isinstance(error, torch.OutOfMemoryError) else "request"
    assert driver.told["bad"][-1] == Failed(type(error).__name__, fault)
    assert [driver.tokens(each.id) for each in clean] == expected
    assert driver.engine.stats().workspace_bytes == 0
    assert all(slab.is_empty for slab in driver.engine.pool.slabs)


def test_workspaces_of_all_prompts_count_against_the_limit(models):
    token = models["llama"].kv_shape.token_bytes
    limit = 600 * token
    driver = Driver(models["llama"], **OFF, step_tokens=64, kv_bytes=limit)
    policies = ["full", "adakv@20:window=4", "fastgen", "snapkv@20+kivi4:window=4", "h2o@20"]
    requests = [make_request(prompt(130 - 9 * i), new=9, policy=policies[i % 5], name=str(i)) for i in range(12)]
    driver.submit(*requests)  # each shorter than those before it, which are in progress yet
    most = together = 0
    while driver.engine.step():
        stats = driver.engine.stats()
        most = max(most, stats.slot_bytes + stats.workspace_bytes)
        together = max(together, len(driver.engine.scheduler.prefilling))
    assert together > 1
    assert 0 < most <= limit
    assert all(len(driver.tokens(str(i))) == 9 for i in range(12))


def test_prompts_without_an_answer_and_cancelled_ones_leave_nothing(driver):
    busy = driver(**OFF)
    busy.submit(*(make_request(prompt(40, seed=i), new=i % 2, name=str(i)) for i in range(6)))
    busy.engine.step()
    in_progress = [each.request.id for each in busy.engine.scheduler.prefilling]
    busy.engine.cancel(in_progress[0])
    busy.run()
    assert busy.finished(in_progress[0]).reason == "cancelled"
    assert [len(busy.tokens(str(i))) for i in range(6) if str(i) != in_progress[0]] == [
        i % 2 for i in range(6) if str(i) != in_progress[0]
    ]
    assert busy.engine.stats().workspace_bytes == 0

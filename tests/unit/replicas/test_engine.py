"""The engine against plain transformers and against the slow reference, in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import BLOCK, FAMILIES, VOCABULARY, Driver, make_request
from tests.unit.replicas.reference import Reference
from warmkv.config import PolicySpec
from warmkv.policies import budgets
from warmkv.replicas.protocol import QueueFullError, RequestTooLargeError

POLICIES = ["full", "streaming_llm@20", "snapkv@20", "snapkv@0.5", PolicySpec(name="snapkv", budget=24, window=6)]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCABULARY), k=length)


def generate(model: Any, tokens: list[int], new: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([tokens]), max_new_tokens=new, do_sample=False, attention_mask=torch.ones(1, len(tokens))
        )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_full_cache_equals_transformers_alone_and_in_a_mixed_batch(driver, references, family):
    lengths = [1, 5, 16, 17, 40, 61]
    expected = [generate(references[family], prompt(n), 12) for n in lengths]
    alone = [driver(family).run(make_request(prompt(n), new=12))[0] for n in lengths]
    assert alone == expected
    mixed = driver(family, max_slots=4)
    requests = [make_request(prompt(n), new=12, name=str(n)) for n in lengths]
    requests += [make_request(prompt(33, seed=i), new=5 + i, policy="snapkv@8", name=f"other{i}") for i in range(3)]
    assert mixed.run(*requests)[: len(lengths)] == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", POLICIES, ids=str)
@pytest.mark.parametrize("length", [3, 21, 50])
def test_policies_equal_the_slow_reference(models, references, family, spec, length):
    spec = PolicySpec.model_validate(spec)
    tokens = prompt(length)
    budget = budgets.resolve_budget(spec, length) or length
    expected, expected_logits = Reference(references[family]).generate(tokens, 30, spec, budget)
    seen: list[torch.Tensor] = []
    driver = Driver(models[family])
    draw = driver.engine._draw
    driver.engine._draw = lambda sequences, logits: (seen.append(logits[0].clone()), draw(sequences, logits))  # type: ignore
    assert driver.run(make_request(tokens, new=30, policy=spec)) == [expected]
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected_logits), rtol=1e-4, atol=1e-4)
    assert driver.started("request").kept_tokens == min(budget, length)


@pytest.mark.parametrize("spec", POLICIES, ids=str)
def test_cached_prefix_changes_nothing_for_cuts_at_any_position(driver, spec):
    tokens = prompt(43)
    fresh = driver(prefix_cache={"enabled": False}).run(make_request(tokens, new=12, policy=spec))
    for cut in range(1, len(tokens) + 1):
        warm = driver()
        warm.run(make_request(tokens[:cut], new=1, marks={cut: "5m"}, name="first"))
        assert warm.run(make_request(tokens, new=12, policy=spec, reads=[cut], name="second")) == fresh
        started = warm.started("second")
        assert started.hit == cut
        redone = budgets.recomputed_tokens(PolicySpec.model_validate(spec), len(tokens))
        assert started.cached_tokens == min(cut, len(tokens) - redone)


def test_a_compressed_request_leaves_the_whole_prefix_for_the_next(driver):
    tokens = prompt(48)
    fresh = driver(prefix_cache={"enabled": False}).run(make_request(tokens, new=10))
    warm = driver()
    warm.run(make_request(tokens, new=10, policy="streaming_llm@12", name="first"))
    assert warm.run(make_request(tokens, new=10, name="second")) == fresh
    assert warm.started("second").cached_tokens == 47


def test_automatic_reuse_is_by_full_blocks(driver):
    warm = driver()
    tokens = prompt(30)
    warm.run(make_request(tokens, new=1, name="first"))
    warm.run(make_request(tokens[:20] + prompt(10, seed=1), new=1, name="second"))
    assert warm.started("second").cached_tokens == 16
    assert warm.started("second").hit == 0  # nothing was marked, so nothing is billed as a read


def test_sampling_with_a_seed_does_not_depend_on_the_batch(driver):
    def request(name: str, seed: int, length: int) -> Any:
        return make_request(prompt(length), new=20, name=name, seed=seed, temperature=1.0, top_p=0.9, top_k=50)

    alone = driver().run(request("x", 7, 30))[0]
    busy = driver(max_slots=3).run(*[request(str(i), i, 10 + i) for i in range(5)], request("x", 7, 30))
    assert busy[-1] == alone
    assert driver().run(request("x", 8, 30))[0] != alone


def test_ends_at_eos_and_at_max_tokens(models, driver):
    tokens = prompt(10)
    free = driver().run(make_request(tokens, new=12))[0]
    stop_at = next(i for i, token in enumerate(free) if token not in free[:i] and i > 2)
    ending = Driver(models["llama"])
    ending.engine.model = type(models["llama"])(
        **{
            **{name: getattr(models["llama"], name) for name in models["llama"].__slots__},
            "eos_ids": frozenset([free[stop_at]]),
        }
    )
    assert ending.run(make_request(tokens, new=12)) == [free[:stop_at]]
    assert ending.finished("request").reason == "end"
    assert ending.finished("request").output_tokens == stop_at + 1
    ignoring = make_request(tokens, new=12, name="on", ignore_eos=True)
    assert ending.run(ignoring) == [free]
    assert ending.finished("on").reason == "length"


def test_prewarming_computes_the_prompt_and_draws_nothing(driver):
    warm = driver()
    assert warm.run(make_request(prompt(20), new=0, marks={20: "1h"})) == [[]]
    assert warm.finished("request").output_tokens == 0
    warm.run(make_request(prompt(20), new=1, reads=[20], name="second"))
    assert warm.started("second").hit == 20


def test_memory_is_freed_when_requests_end_or_leave(driver):
    busy = driver(max_slots=4)
    for i in range(6):
        busy.submit(make_request(prompt(20 + i), new=50, name=str(i)))
    for _ in range(12):
        busy.engine.step()
    for i in range(6):
        busy.engine.cancel(str(i))
    while busy.engine.step():
        pass
    stats = busy.engine.stats()
    assert (stats.waiting, stats.decoding, stats.workspace_bytes) == (0, 0, 0)
    assert all(slab.is_empty for slab in busy.engine.pool.slabs)
    assert {busy.finished(str(i)).reason for i in range(6)} == {"cancelled"}
    assert busy.run(make_request(prompt(9), new=3, name="after")) == driver().run(make_request(prompt(9), new=3))


def test_slots_never_exceed_the_byte_limit_and_all_requests_are_served(driver, models):
    token = models["llama"].kv_shape.token_bytes
    limit = 200 * token
    tight = driver(kv_bytes=limit)
    requests = [
        make_request(prompt(20 + 7 * i), new=10 + i, name=str(i), policy=("full", "snapkv@10")[i % 2]) for i in range(9)
    ]
    tight.submit(*requests)
    peak = 0
    while tight.engine.step():
        stats = tight.engine.stats()
        peak = max(peak, stats.slot_bytes + stats.workspace_bytes)
    assert 0 < peak <= limit
    assert [len(tight.tokens(str(i))) for i in range(9)] == [10 + i for i in range(9)]


def test_what_cannot_be_served_is_refused_at_once(driver):
    small = driver(kv_bytes=100_000, max_context=64, max_queue=2)
    with pytest.raises(RequestTooLargeError, match="exceed the context of 64"):
        small.submit(make_request(prompt(60), new=5))
    with pytest.raises(RequestTooLargeError, match="kv_bytes"):
        driver(kv_bytes=10_000).submit(make_request(prompt(60), new=5))
    small.submit(make_request(prompt(5), name="0"), make_request(prompt(5), name="1"))
    with pytest.raises(QueueFullError):
        small.submit(make_request(prompt(5), name="2"))
    small.run()
    assert len(small.run(make_request(prompt(5), name="3"))[0]) == 8  # the queue is empty again


def test_a_failing_step_ends_what_it_computed_and_the_engine_goes_on(driver, monkeypatch):
    shaky = driver()
    shaky.submit(make_request(prompt(5), name="lost"))
    monkeypatch.setattr(shaky.engine, "_forward", lambda *a: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(RuntimeError):
        shaky.engine.step()
    shaky.engine._fail_all("RuntimeError: device lost")
    monkeypatch.undo()
    assert "device lost" in shaky.told["lost"][-1].message
    assert shaky.run(make_request(prompt(5), name="next")) == driver().run(make_request(prompt(5)))


def test_streaming_ring_has_constant_memory_far_beyond_its_budget(driver):
    long = driver()
    long.submit(make_request(prompt(10), new=400, policy="streaming_llm@16"))
    sizes = set()
    while long.engine.step():
        sizes.add(long.engine.stats().slot_bytes)
    assert len(sizes) == 1
    assert len(long.tokens("request")) == 400


def test_store_tells_of_every_full_block_that_comes_and_goes(driver, models):
    block = BLOCK * models["llama"].kv_shape.token_bytes
    small = driver(prefix_cache={"memory_bytes": 4 * block})
    resident: set[bytes] = set()
    for i in range(6):
        small.run(make_request(prompt(20, seed=i), new=1, marks={19: "5m"}, name=str(i)))
        assert small.engine.stats().store_bytes <= 4 * block
    for stored, evicted in small.events:
        assert not resident & set(stored)
        assert resident >= set(evicted)
        resident = (resident | set(stored)) - set(evicted)
    assert resident == set(small.engine.store.full_blocks())

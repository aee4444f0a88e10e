"""The engine against plain transformers and against the slow reference, in float32."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import pytest
import torch

from tests.polling import PATIENCE, until
from tests.unit.replicas.conftest import BLOCK, FAMILIES, VOCABULARY, Driver, make_request
from tests.unit.replicas.reference import Reference
from warmkv.logs import RequestFields
from warmkv.policies import budgets, slot_sizes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.block_store.io_threads import Threads
from warmkv.replicas.constraints.masks import Masks
from warmkv.replicas.current_device import make_current
from warmkv.replicas.protocol import Finished, QueueFullError, UnservableRequestError
from warmkv.request_context import RequestContext

POLICIES = [
    "full",
    "streaming_llm@20",
    "snapkv@20",
    "snapkv@0.5",
    PolicySpec(name="snapkv", budget=24, window=6),
    "pyramidkv@20:window=4",
    "expected_attention@20:window=16",
    "adakv@16:window=4",
    "tova@16",
    "rocketkv@8:window=4",
]
SLOW_POLICIES = POLICIES[:5]


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
@pytest.mark.parametrize("spec", SLOW_POLICIES, ids=str)
@pytest.mark.parametrize("length", [3, 21, 50])
def test_policies_equal_the_slow_reference(models, references, family, spec, length):
    spec = PolicySpec.model_validate(spec)
    tokens = prompt(length)
    expected, expected_logits = Reference(references[family]).generate(tokens, 30, spec)
    seen: list[torch.Tensor] = []
    driver = Driver(models[family])
    draw = driver.engine.executor._draw

    def watched(sequences: Any, logits: torch.Tensor, *given: Any) -> list[int]:
        seen.append(logits[0].clone())
        return draw(sequences, logits, *given)

    driver.engine.executor._draw = watched  # type: ignore[method-assign]
    assert driver.run(make_request(tokens, new=30, policy=spec)) == [expected]
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected_logits), rtol=1e-4, atol=1e-4)
    assert driver.started("request").kept_tokens == budgets.kept_tokens(spec, length)


# Around the ends of blocks of 8 and chunks of 16, at every place within a block, and the ends of the prompt.
CUTS = 1, 2, 7, 8, 9, 12, 15, 16, 17, 22, 27, 31, 32, 33, 37, 42, 43


@pytest.mark.parametrize("spec", POLICIES, ids=str)
@pytest.mark.parametrize(
    "cuts",
    [pytest.param(CUTS, marks=pytest.mark.short), pytest.param(range(1, 44), marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_cached_prefix_changes_nothing_for_cuts_at_any_position(driver, spec, cuts):
    tokens = prompt(43)
    fresh = driver(prefix_cache={"enabled": False}).run(make_request(tokens, new=12, policy=spec))
    for cut in cuts:
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
    ending = Driver(dataclasses.replace(models["llama"], eos_ids=frozenset([free[stop_at]])))
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
    assert (stats.slots, stats.pinned_bytes) == (0, 0)
    assert all(slab.is_empty for slab in busy.engine.pool.slabs)
    assert {busy.finished(str(i)).reason for i in range(6)} == {"cancelled"}
    assert busy.run(make_request(prompt(9), new=3, name="after")) == driver().run(make_request(prompt(9), new=3))


def test_slots_never_exceed_the_byte_limit_and_all_requests_are_served(driver, models):
    token = models["llama"].kv_shape.token_bytes
    limit = 200 * token
    tight = driver(kv_bytes=limit)
    new = [0, 1, 10, 12, 14, 16, 18, 20, 22]
    requests = [
        make_request(prompt(20 + 7 * i), new=new[i], name=str(i), policy=("full", "snapkv@10")[i % 2]) for i in range(9)
    ]
    tight.submit(*requests)
    peak = 0
    while tight.engine.step():
        stats = tight.engine.stats()
        peak = max(peak, stats.slot_bytes + stats.workspace_bytes)
    assert 0 < peak <= limit
    assert [len(tight.tokens(str(i))) for i in range(9)] == new


def test_what_cannot_be_served_is_refused_at_once(driver):
    small = driver(kv_bytes=100_000, max_context=64, max_queue=2)
    with pytest.raises(UnservableRequestError, match="exceed the context of 64"):
        small.submit(make_request(prompt(60), new=5))
    with pytest.raises(UnservableRequestError, match="kv_bytes"):
        driver(kv_bytes=10_000).submit(make_request(prompt(60), new=5))
    one_slot = driver(max_slots=1, max_queue=1)
    one_slot.submit(make_request(prompt(5), name="0"), make_request(prompt(5), name="1"))
    for _ in range(3):
        one_slot.engine.cancel("never heard of")  # not a request: it takes no place in the queue
    with pytest.raises(QueueFullError):
        one_slot.submit(make_request(prompt(5), name="2"))
    one_slot.run()
    assert len(one_slot.run(make_request(prompt(5), name="3"))[0]) == 8  # the queue is empty again
    for bad in ([], [VOCABULARY], [2**31]):
        with pytest.raises(UnservableRequestError, match="vocabulary"):
            small.submit(make_request(bad))
    with pytest.raises(ValueError, match="max_context 100000 exceeds"):
        driver(max_context=100_000)


def fail_once(engine: Any, monkeypatch: Any, name: str) -> None:
    """The next call of an engine's method raises, as a device that runs out of memory would."""
    original, left = getattr(engine, name), [1]

    def failing(*args: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise RuntimeError("device out of memory")
        return original(*args, **options)

    monkeypatch.setattr(engine, name, failing)


@pytest.mark.parametrize("place", ["match", "attach", "_hand_off", "fill"])
def test_a_failing_prompt_ends_alone_and_leaves_nothing_behind(driver, monkeypatch, place):
    shaky = driver()
    tokens = prompt(40)
    expected = driver().run(make_request(prompt(9), new=20))[0]
    shaky.run(make_request(tokens, new=1, marks={37: "5m"}, name="before"))
    shaky.submit(make_request(prompt(9), new=20, name="decodes"))
    shaky.engine.step()
    owner = {"fill": shaky.engine.pool, "_hand_off": shaky.engine}.get(place, shaky.engine.store)
    fail_once(owner, monkeypatch, place)
    shaky.run(make_request(tokens, name="lost", reads=[37]))
    assert "RuntimeError" in shaky.told["lost"][-1].message
    assert shaky.tokens("decodes") == expected
    assert shaky.engine.store.pinned_bytes == 0
    assert all(slab.is_empty for slab in shaky.engine.pool.slabs)
    assert shaky.run(make_request(tokens, reads=[37], name="after")) == driver().run(make_request(tokens))
    assert shaky.started("after").hit == 37


def test_an_allocation_that_fails_ends_its_request_only(driver, monkeypatch, caplog):
    shaky = driver()
    caplog.handler.addFilter(RequestFields())
    fail_once(shaky.engine.pool, monkeypatch, "claim")
    lost = dataclasses.replace(make_request(prompt(5), name="lost"), context=RequestContext("req_lost"))
    shaky.run(lost, make_request(prompt(5), name="next"))
    assert "RuntimeError" in shaky.told["lost"][-1].message
    assert len(shaky.tokens("next")) == 8
    assert [record.getMessage() for record in caplog.records] == ["prefill failed request=req_lost"]


def test_a_store_that_fails_half_way_fails_no_request_and_promises_nothing_it_does_not_have(driver, monkeypatch):
    shaky, expected = driver(), driver().run(make_request(prompt(40)))
    original, calls = torch.stack, []

    def stack(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("device out of memory")
        return original(*args, **options)

    monkeypatch.setattr("warmkv.replicas.block_store.store.torch.stack", stack)
    assert shaky.run(make_request(prompt(40), marks={40: "5m"}, name="first")) == expected
    assert shaky.started("first").written == 0
    assert not any(shaky.engine.stats().failures.values())
    store = shaky.engine.store
    assert {key for run in store.tree.recent(0) for key in run.keys} == set(store.places[0].blocks)
    assert len(store.places[0].blocks) == 2
    assert shaky.run(make_request(prompt(40), name="after")) == expected
    assert shaky.started("after").cached_tokens == 2 * BLOCK


def test_logits_that_are_no_numbers_fail_their_request_and_poison_no_slot(driver, monkeypatch):
    shaky = driver()
    tokens = prompt(20)
    expected = driver().run(make_request(tokens, new=8))
    shaky.submit(make_request(tokens, new=8, name="poisoned"))
    while not shaky.tokens("poisoned"):
        shaky.engine.step()
    (slab,) = shaky.engine.pool.slabs
    with torch.inference_mode():
        slab.memory.keys[0][:, 0] = float("nan")
        slab.memory.values[0][:, 0] = float("nan")
    shaky.run()
    assert "not finite" in shaky.told["poisoned"][-1].message
    assert shaky.run(make_request(tokens, new=8, name="same row")) == expected


def test_stopping_tells_everybody(driver):
    stopped = driver(max_slots=1)
    stopped.submit(make_request(prompt(5), name="decodes", new=30), make_request(prompt(6), name="waits", new=30))
    stopped.engine.step()
    stopped.engine.stop()
    stopped.engine.run()  # returns by itself
    assert all("stopping" in stopped.told[name][-1].message for name in ("decodes", "waits"))


def test_a_device_that_is_lost_ends_the_engine(driver, monkeypatch):
    lost = driver()
    lost.submit(make_request(prompt(5), name="a"))
    monkeypatch.setattr(lost.engine, "_admit", lambda: (_ for _ in ()).throw(RuntimeError("device lost")))
    lost.engine.run()  # returns by itself
    assert "stopping" in lost.told["a"][-1].message


@pytest.mark.parametrize(("later", "hit"), [(299.0, 32), (301.0, 0)])
def test_a_ttl_runs_from_the_moment_when_the_request_came_in(driver, later, hit):
    now = [0.0]
    slow = driver(clock=lambda: now[0], prefix_cache={"ttls": {"5m": 300.0}})
    slow.submit(make_request(prompt(40), new=1, marks={32: "5m"}, name="first"))
    slow.engine.step()
    now[0] = 100.0  # its prefill takes so long
    slow.run()
    now[0] = later
    slow.run(make_request(prompt(40), new=1, reads=[32], name="second"))
    assert slow.started("second").hit == hit


def test_a_busy_engine_expires_what_has_outlived_its_ttl(driver):
    now = [0.0]
    busy = driver(clock=lambda: now[0])
    tokens = prompt(40)
    busy.run(make_request(tokens, new=1, marks={40: "5m"}, name="first"))
    busy.submit(make_request(prompt(10), new=20, name="decodes"))
    busy.engine.step()
    now[0] = 301.0
    busy.engine.step()
    assert set(busy.events[-1][1]) >= set(make_request(tokens).hashes)
    now[0] = 302.0
    for name in ("second", "third"):  # written again after it had expired, then read
        assert busy.run(make_request(tokens, name=name, marks={40: "5m"}, reads=[40])) == driver().run(
            make_request(tokens)
        )
    assert busy.started("third").hit == 40


def test_what_memory_does_not_suffice_for_is_not_reported_as_written(driver):
    small = driver(prefix_cache={"memory_bytes": 100})
    small.run(make_request(prompt(40), marks={40: "5m"}))
    assert small.started("request").written == 0
    large = driver()
    large.run(make_request(prompt(40), marks={13: "1h", 40: "5m"}))
    assert large.started("request").written == 40


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
    assert resident == set(small.engine.store.full_blocks()["device"])


SCORED = ["h2o@20", "h2o@0.4+kivi4", "fastgen:recovery=0.7"]


@pytest.mark.parametrize("spec", SCORED)
def test_what_all_queries_gave_is_the_same_for_a_cached_prefix(driver, spec):
    """Sums of attention are kept with a prefix at its last blocks and at marks, and gone on with from there."""
    tokens = prompt(61)
    fresh = driver(prefix_cache={"enabled": False}).run(make_request(tokens, new=30, policy=spec))
    for cut, reused in ((43, 43), (40, 40), (24, 24), (60, 60)):
        warm = driver()
        warm.run(make_request(tokens[:cut], new=1, policy=spec, marks={cut: "5m"}, name="first"))
        assert warm.run(make_request(tokens, new=30, policy=spec, reads=[cut], name="second")) == fresh
        assert warm.started("second").cached_tokens == reused
    unseen = driver()
    unseen.run(make_request(tokens, new=1, name="first"))  # the full cache has no use for such sums
    assert unseen.run(make_request(tokens, new=30, policy=spec, name="second")) == fresh
    assert unseen.started("second").cached_tokens == 0
    assert unseen.run(make_request(tokens, new=30, policy=spec, name="third")) == fresh
    assert unseen.started("third").cached_tokens == 56  # the last full block
    for name in ("fourth", "fifth"):  # a prompt of whole blocks
        unseen.run(make_request(tokens[:56], new=30, policy=spec, name=name))
    assert unseen.started("fifth").cached_tokens == 48


def test_sums_of_attention_count_against_the_memory_of_the_store_and_leave_with_their_prefix(driver, models):
    shape = models["llama"].kv_shape
    now = [0.0]
    warm = driver(clock=lambda: now[0])
    warm.run(make_request(prompt(40), new=1, name="plain"))
    plain = warm.engine.store.resident_bytes
    warm.run(make_request(prompt(40), new=1, policy="h2o@20", name="scored"))
    assert warm.engine.store.resident_bytes == plain + 4 * shape.layers * shape.kv_heads * (32 + 40)
    now[0] = 1000.0
    warm.engine.store.expire()
    assert (warm.engine.store.resident_bytes, len(warm.engine.store), len(warm.engine.store.places[0].blocks)) == (
        0,
        0,
        0,
    )
    tight = driver(prefix_cache={"memory_bytes": 5 * BLOCK * shape.token_bytes})
    for i in range(6):
        tight.run(make_request(prompt(30, seed=i), new=2, policy="h2o@20", name=str(i)))
        assert tight.engine.store.resident_bytes <= 5 * BLOCK * shape.token_bytes
        held = sum(packed.nbytes for packed in tight.engine.store.places[0].blocks.values())
        assert held == tight.engine.store.resident_bytes


def test_a_tenant_with_many_requests_does_not_make_others_wait_for_all_of_them(driver):
    busy = driver(max_slots=1)
    order: list[str] = []
    requests = [(f"many {i}", "many") for i in range(6)] + [("one", "few"), ("two", "few")]
    for i, (name, tenant) in enumerate(requests):
        request = dataclasses.replace(make_request(prompt(12, seed=i), new=3, name=name), tenant=tenant)
        busy.engine.submit(
            request, lambda event, name=name: order.append(name) if isinstance(event, Finished) else None
        )
    while busy.engine.step():
        pass
    assert len(order) == 8
    assert order.index("one") <= 2
    assert order.index("two") <= 4


def test_idle_rows_beside_a_stream_without_end_do_not_starve_others(driver, models):
    shape, big = models["llama"].kv_shape, PolicySpec()
    stream = PolicySpec.model_validate("streaming_llm@64")
    room = slot_sizes.slot_bytes(stream, shape, 100, 10**6) + slot_sizes.slot_bytes(big, shape, 300, 50)
    room += slot_sizes.workspace_bytes(big, shape, 300) + 4096
    busy = driver(prefix_cache={"enabled": False}, kv_bytes=room)
    busy.submit(make_request(prompt(100), new=10**6, policy=stream, name="stream"))
    while not busy.tokens("stream"):
        busy.engine.step()
    busy.submit(make_request(prompt(300), new=50, name="big"))
    for _ in range(120):
        busy.engine.step()
        stats = busy.engine.stats()
        assert stats.slot_bytes + stats.workspace_bytes <= room
    assert len(busy.tokens("big")) == 50
    assert busy.tokens("big") == driver().run(make_request(prompt(300), new=50))[0]


def test_sums_of_attention_live_as_long_as_the_mark_they_belong_to(driver):
    now = [0.0]
    warm = driver(clock=lambda: now[0])
    tokens = prompt(60)
    warm.run(make_request(tokens[:40], new=1, policy="h2o@20", marks={40: "1h"}, name="first"))
    now[0] = 600.0
    warm.run(make_request(tokens, new=1, policy="h2o@20", reads=[40], name="second"))
    assert warm.started("second").cached_tokens == 40


def test_a_step_that_never_ends_is_noticed_and_one_that_ends_is_forgiven(driver):
    now, gate = [0.0], threading.Event()
    engine = driver(clock=lambda: now[0]).engine
    inside = threading.Event()

    def hang() -> None:
        inside.set()
        gate.wait(PATIENCE)

    engine.call(hang)
    thread = threading.Thread(target=engine.run)
    thread.start()
    assert inside.wait(PATIENCE)
    now[0] = 99.0
    engine.check_turning(100.0)
    now[0] = 101.0
    with pytest.raises(RuntimeError, match="in one step for 101 s"):
        engine.check_turning(100.0)
    turns = engine.turns
    gate.set()
    until(lambda: engine.turns >= turns + 2, "the engine turns")
    engine.check_turning(100.0)
    engine.stop()
    thread.join()


def test_threads_that_touch_the_device_make_it_their_current_one(driver, monkeypatch):
    """Look at each thread: Triton, events and graphs go by its device, which is the first GPU at its start."""
    engine, second, made = driver().engine, torch.device("cuda:1"), dict[str, torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update({threading.current_thread().name: device}))
    engine.model = dataclasses.replace(engine.model, device=second)
    engine.stop()
    engine.start()
    engine.stop()
    masks, lanes = Masks(VOCABULARY, second), Threads(second)
    masks._pool.submit(int)
    masks._pool.shutdown()
    lanes.submit("read", lambda: None)
    lanes.close()
    assert made == {"engine": second, "masks_0": second, "blocks-read_0": second}
    make_current(torch.device("cpu"))
    make_current(torch.device("cuda"))
    assert len(made) == 3

"""Tiers, tenants and identical prompts through the engine: nothing but the speed depends on where KV comes from."""

from __future__ import annotations

import dataclasses
import random
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.polling import PATIENCE
from tests.unit.replicas.conftest import BLOCK, VOCABULARY, Driver, make_request, random_model
from warmkv.replicas.engine import prompts
from warmkv.replicas.engine.engine import IDLE_SECONDS
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.protocol import Failed

TOKENS = random.Random(1).choices(range(VOCABULARY), k=61)


def block_bytes(models: Any) -> int:
    return BLOCK * models["llama"].kv_shape.token_bytes


def tiered(models: Any, path: Any = None, host: int = 100, **settings: Any) -> Driver:
    """Return an engine whose device holds 8 blocks, with host memory of so many, and a disk if there is a path."""
    size = block_bytes(models)
    cache: dict[str, Any] = {"memory_bytes": 8 * size, "host": {"memory_bytes": host * size}}
    if path is not None:
        cache["disk"] = {"memory_bytes": 100 * (size + 4096), "path": path}
    return Driver(models["llama"], prefix_cache=cache | settings.pop("prefix_cache", {}), **settings)


def watch(driver: Driver) -> list[torch.Tensor]:
    """Return the logits of everything that is drawn from now on."""
    seen: list[torch.Tensor] = []
    draw = driver.engine.executor._draw

    def watched(sequences: Any, logits: torch.Tensor, *given: Any) -> list[int]:
        seen.append(logits.clone())
        return draw(sequences, logits, *given)

    driver.engine.executor._draw = watched  # type: ignore[method-assign]
    return seen


def fill(driver: Driver, start: int = 0) -> None:
    """Other prompts, so that what was stored before leaves the device."""
    for number in range(start, start + 3):
        tokens = random.Random(100 + number).choices(range(VOCABULARY), k=40)
        driver.run(make_request(tokens, new=1, name=f"other {number}"))


def until_written(driver: Driver) -> None:
    """Wait for the threads, as the engine would meet them later."""
    while driver.engine.store.moving:
        driver.engine._inbox.wait(IDLE_SECONDS)
        driver.engine.store.settle()


POLICIES = ["full", "snapkv@20", "h2o@20", "expected_attention@20:window=16"]


def compare(models: Any, path: Any, tier: str, policy: str) -> Driver:
    """Return the same requests with a large device tier, and with the blocks in `tier`: equal logits, bit by bit.

    Nothing is compiled: a compiler times its kernels, and may choose others for the second engine.
    """
    reference = Driver(models["llama"], compile="off")
    told = tiered(models, path if tier == "disk" else None, host=0 if tier == "disk" else 100, compile="off")
    seen = []
    for driver in (reference, told):
        driver.run(make_request(TOKENS[:53], new=1, marks={53: "5m"}, policy=policy, name="first"))
        if driver is told and tier != "device":
            fill(driver)
        until_written(driver)
        logits = watch(driver)
        driver.run(make_request(TOKENS, new=12, policy=policy, reads=[53], name="second"))
        seen.append(torch.cat(logits))
    expected, found = reference.started("second"), told.started("second")
    assert (found.cached_tokens, found.hit) == (expected.cached_tokens, expected.hit)
    assert expected.cached_tokens > 40
    assert sum(found.tiers.values()) == found.cached_tokens
    if tier != "device":
        assert found.tiers[tier] > 0
    assert torch.equal(*seen)
    return told


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_kv_of_every_tier_gives_the_same_logits_bit_by_bit(models, tmp_path, tier, policy):
    """Against the device tier, which the engine's tests hold against computing the prompt anew."""
    compare(models, tmp_path, tier, policy)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_the_same_on_a_gpu_whose_host_tier_is_page_locked(tmp_path, tier, policy):
    driver = compare({"llama": prepare(random_model("llama").cuda())}, tmp_path, tier, policy)
    for place in driver.engine.store.places:
        for packed in place.blocks.values():
            assert packed.parts[0].is_cuda == (place.tier.name == "device")
            assert packed.parts[0].is_pinned() == (place.tier.name == "host")


def test_others_decode_while_a_long_prefix_is_copied(models, monkeypatch):
    """A block a step, here: the other request draws a token in each; afterwards all is as without it."""
    monkeypatch.setattr(prompts, "ATTACHED_ON_CPU", 1)
    driver = tiered(models)
    driver.run(make_request(TOKENS, new=1, name="first"))
    fill(driver)
    (expected,) = driver.run(make_request(TOKENS, new=9, name="alone"))
    fill(driver, 3)
    driver.submit(make_request(TOKENS[::-1], new=40, name="other"))
    while not driver.tokens("other"):
        driver.engine.step()
    driver.submit(make_request(TOKENS, new=9, name="second"))
    drawn = []
    while not driver.told["second"]:
        driver.engine.step()
        drawn.append(len(driver.tokens("other")))
    blocks = driver.started("second").cached_tokens // BLOCK
    assert driver.started("second").tiers["host"] > 2 * BLOCK
    assert len(drawn) >= blocks
    assert all(after > before for before, after in pairwise(drawn))
    while driver.engine.step():
        pass
    assert driver.tokens("second") == expected


def test_fresh_kv_and_every_tier_draw_the_same_tokens(models, tmp_path):
    fresh = Driver(models["llama"], prefix_cache={"enabled": False}).run(make_request(TOKENS, new=20))
    driver = tiered(models, tmp_path, host=9)
    for number in range(4):
        assert driver.run(make_request(TOKENS, new=20, name=str(number))) == fresh
        fill(driver, 3 * number)
        until_written(driver)
    assert {tier for number in range(1, 4) for tier in driver.started(str(number)).tiers} >= {"disk"}


def test_what_is_on_disk_is_found_after_a_restart(models, tmp_path):
    first = tiered(models, tmp_path, host=0)
    expected = first.run(make_request(TOKENS, new=9, marks={61: "1h"}, name="first"))
    fill(first)
    until_written(first)
    first.engine.store.close()
    second = tiered(models, tmp_path, host=0)
    assert second.run(make_request(TOKENS, new=9, reads=[61], name="again")) == expected
    started = second.started("again")
    assert (started.tiers, started.ttl, started.hit) == ({"disk": 60}, 3600.0, 61)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_what_only_memory_held_is_found_after_a_clean_stop_that_has_time_for_it(models, tmp_path, seconds):
    first = tiered(models, tmp_path)
    expected = first.run(make_request(TOKENS, new=9, marks={61: "1h"}, name="first"))
    first.engine.start()
    first.engine.stop(seconds)  # waits until all is written
    second = tiered(models, tmp_path)
    assert second.run(make_request(TOKENS, new=9, reads=[61], name="again")) == expected
    started = second.started("again")
    assert (started.tiers, started.hit) == (({"disk": 60}, 61) if seconds else ({}, 0))


def test_a_damaged_file_is_computed_anew(models, tmp_path, caplog):
    driver = tiered(models, tmp_path, host=0)
    expected = driver.run(make_request(TOKENS, new=9, name="first"))
    fill(driver)
    until_written(driver)
    key = make_request(TOKENS).hashes[3]
    path = next(tmp_path.rglob(f"{key.hex()}*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert driver.run(make_request(TOKENS, new=9, name="again")) == expected
    assert driver.started("again").cached_tokens == 3 * BLOCK
    assert "checksum does not agree" in caplog.text
    assert driver.run(make_request(TOKENS, new=9, name="third")) == expected
    assert driver.started("third").cached_tokens == 7 * BLOCK


def test_others_decode_while_files_are_read(models, tmp_path):
    driver = tiered(models, tmp_path, host=0)
    driver.run(make_request(TOKENS, new=1, name="first"))
    fill(driver)
    until_written(driver)
    gate = threading.Event()
    driver.engine.store._jobs.threads.submit("read", lambda: gate.wait(PATIENCE))
    driver.submit(make_request(TOKENS[9:20], new=20, name="decodes"))
    driver.engine.step()
    driver.submit(make_request(TOKENS, new=3, name="waits"))
    while len(driver.tokens("decodes")) < 15:
        driver.engine.step()
    assert driver.told["waits"] == []
    gate.set()
    driver.run()
    assert len(driver.tokens("waits")) == 3
    assert driver.started("waits").tiers["disk"] > 0


def test_a_disk_that_does_not_answer_is_not_waited_for_for_long(models, tmp_path):
    now = [0.0]
    driver = tiered(models, tmp_path, host=0, clock=lambda: now[0])
    expected = driver.run(make_request(TOKENS, new=5, name="first"))
    fill(driver)
    until_written(driver)
    gate = threading.Event()
    driver.engine.store._jobs.threads.submit("read", lambda: gate.wait(PATIENCE))
    driver.submit(make_request(TOKENS, new=5, name="waits"))
    driver.engine.step()
    now[0] = 4.9
    driver.engine.step()
    assert driver.told["waits"] == []
    now[0] = 5.0
    assert driver.run() == []
    assert [driver.tokens("waits")] == expected
    assert driver.started("waits").cached_tokens == 0
    gate.set()
    until_written(driver)
    assert driver.run(make_request(TOKENS, new=5, name="later")) == expected


def test_a_request_that_waits_for_files_can_be_cancelled(models, tmp_path):
    driver = tiered(models, tmp_path, host=0)
    driver.run(make_request(TOKENS, new=1, name="first"))
    fill(driver)
    until_written(driver)
    gate = threading.Event()
    driver.engine.store._jobs.threads.submit("read", lambda: gate.wait(PATIENCE))
    driver.submit(make_request(TOKENS, new=3, name="waits"), make_request(TOKENS[9:20], new=20, name="next"))
    driver.engine._inbox.drain()
    driver.engine._admit()
    driver.engine.cancel("waits")
    driver.run()
    gate.set()
    assert driver.finished("waits").reason == "cancelled"
    assert len(driver.tokens("next")) == 20
    assert driver.engine.store.pinned_bytes == 0


@pytest.mark.parametrize("storage", ["fp8", "kivi4"])
def test_lossy_tiers_answer_with_nearly_the_same_logits(models, storage):
    tokens, size = TOKENS + TOKENS[::-1], 32 * models["llama"].kv_shape.token_bytes

    def request(name: str) -> Any:
        return make_request(tokens, new=1, name=name, block=32)

    exact = Driver(models["llama"])
    logits = watch(exact)
    exact.run(make_request(tokens, new=1))
    cache = {"memory_bytes": 4 * size, "host": {"memory_bytes": 99 * size, "storage": storage}}
    driver = Driver(models["llama"], prefix_cache={"block_size": 32, **cache})
    driver.run(request("first"))
    driver.run(make_request(TOKENS[:40] * 4, new=1, name="other", block=32))
    until_written(driver)
    seen = watch(driver)
    driver.run(request("again"))
    until_written(driver)
    assert driver.started("again").tiers["host"] > 0
    difference = (seen[0] - logits[0]).abs().max()
    assert 0 < difference < 0.5 * logits[0].std()
    blocks = driver.engine.store.places[1].blocks.values()
    assert driver.engine.store.tier_bytes["host"] == sum(packed.nbytes for packed in blocks) < 0.6 * len(blocks) * size


def test_a_store_in_fp8_on_the_device_holds_four_times_as_much(models):
    held = []
    for storage in ("model", "fp8"):
        settings = {"storage": storage, "host": {"memory_bytes": 0}}
        driver = tiered(models, prefix_cache=settings)
        for number in range(6):
            driver.run(make_request(random.Random(number).choices(range(VOCABULARY), k=64), new=1, name=str(number)))
        assert driver.engine.stats().store_bytes <= 8 * block_bytes(models)
        held.append(len(driver.engine.store))
    assert held == [8, 32]


# --- identical prompts


def test_identical_prompts_that_come_together_are_computed_once(models):
    driver = Driver(models["llama"])
    names = [str(number) for number in range(5)]
    answers = driver.run(*[make_request(TOKENS, new=6, name=name) for name in names])
    assert len(set(map(tuple, answers))) == 1
    computed = sum(len(TOKENS) - driver.started(name).cached_tokens for name in names)
    assert computed == len(TOKENS) + 4 * (len(TOKENS) - 56)


def admitted_at_once(driver: Driver, *requests: Any) -> list[str]:
    """Return the names of those of some requests that are admitted with the first step."""
    driver.submit(*requests)
    driver.engine.step()
    waiting = [sequence.request.id for sequence in driver.engine.scheduler.waiting]
    return [request.id for request in requests if request.id not in waiting]


@pytest.mark.parametrize("cache", [{"automatic": False}, {"memory_bytes": 0}])
def test_nobody_waits_for_a_prompt_that_leaves_nothing(models, cache):
    driver = Driver(models["llama"], step_tokens=256, prefix_cache=cache)
    assert admitted_at_once(driver, *[make_request(TOKENS, name=name) for name in "abcd"]) == list("abcd")
    assert all(driver.started(name).cached_tokens == 0 for name in "abcd")


def test_what_a_breakpoint_stores_is_waited_for(models):
    driver = Driver(models["llama"], step_tokens=256, prefix_cache={"automatic": False})
    first, *others = [make_request(TOKENS, marks={40: "5m"}, reads=[40], name=name) for name in "abcd"]
    assert admitted_at_once(driver, first, *others) == ["a"]
    driver.run()
    assert all(driver.started(other.id).cached_tokens == 40 for other in others)


@pytest.mark.parametrize(
    ("first", "second", "waits"), [("full", "h2o@20", False), ("h2o@20", "h2o@20", True), ("h2o@20", "full", True)]
)
def test_who_needs_column_sums_waits_for_a_prompt_that_leaves_them(models, first, second, waits):
    driver = Driver(models["llama"], step_tokens=256)
    requests = [make_request(TOKENS, policy=policy, name=name) for name, policy in (("a", first), ("b", second))]
    assert admitted_at_once(driver, *requests) == (["a"] if waits else ["a", "b"])
    driver.run()
    assert driver.started("b").cached_tokens == (56 if waits else 0)


def test_a_short_prompt_does_not_wait_for_a_long_one_for_one_block(models):
    driver = Driver(models["llama"], step_tokens=16)
    long = random.Random(8).choices(range(VOCABULARY), k=400)
    driver.submit(make_request(long, name="long"), make_request([*long[:BLOCK], *TOKENS[:12]], name="short"))
    while not driver.told["short"]:
        driver.engine.step()
    assert driver.told["long"] == []


def test_whoever_waits_goes_on_where_a_cancelled_prompt_was_left(models):
    driver = Driver(models["llama"], step_tokens=16)
    alone = Driver(models["llama"]).run(make_request(TOKENS, new=6))
    driver.submit(make_request(TOKENS, new=6, name="first"), make_request(TOKENS, new=6, name="second"))
    driver.engine.step()
    driver.engine.step()
    driver.engine.cancel("first")
    driver.run()
    assert driver.finished("first").reason == "cancelled"
    assert [driver.tokens("second")] == alone
    assert driver.started("second").cached_tokens == 32


def test_whoever_waits_goes_on_alone_when_the_first_fails(models, monkeypatch):
    driver = Driver(models["llama"])
    alone = Driver(models["llama"]).run(make_request(TOKENS, new=6))
    original = driver.engine.executor.forward

    def failing(*arguments: Any) -> torch.Tensor:
        first = next(iter(driver.engine.scheduler.prefilling), None)
        if first is not None and first.request.id == "first" and first.workspace.computed:
            raise RuntimeError("device out of memory")
        return original(*arguments)

    monkeypatch.setattr(driver.engine.executor, "forward", failing)
    driver.run(make_request(TOKENS, new=6, name="first"), make_request(TOKENS, new=6, name="second"))
    assert isinstance(driver.told["first"][-1], Failed)
    assert [driver.tokens("second")] == alone


# --- tenants


def of(tenant: str, request: Any) -> Any:
    return dataclasses.replace(request, tenant=tenant)


def test_a_tenant_can_have_its_own_prefixes_forgotten(models, tmp_path):
    driver = tiered(models, tmp_path)
    other = random.Random(5).choices(range(VOCABULARY), k=40)
    driver.run(of("a", make_request(TOKENS, new=1, marks={61: "1h"}, name="mine")))
    driver.run(of("b", make_request(other, new=1, name="theirs")))
    until_written(driver)
    held = sum(driver.engine.stats().store_tiers.values())
    freed = driver.engine.drop_prefixes("a")
    driver.run()
    assert freed.result(0) == held - sum(driver.engine.stats().store_tiers.values()) > 0
    driver.run(of("a", make_request(TOKENS, new=1, reads=[61], name="again")))
    assert (driver.started("again").cached_tokens, driver.started("again").hit) == (0, 0)
    driver.run(of("b", make_request(other, new=1, name="still there")))
    assert driver.started("still there").cached_tokens == 39
    empty = driver.engine.drop_prefixes("nobody")
    driver.engine.step()
    assert empty.result(0) == 0


def test_forgetting_what_a_request_reads_does_not_harm_it(models):
    driver = Driver(models["llama"])
    expected = driver.run(of("a", make_request(TOKENS, new=8, name="first")))
    driver.submit(of("a", make_request(TOKENS + TOKENS[:20], new=8, name="reads")))
    driver.engine._inbox.drain()
    driver.engine._admit()
    assert driver.engine.store.drop("a") > 0
    driver.run()
    assert driver.started("reads").cached_tokens == 0
    assert driver.run(of("a", make_request(TOKENS, new=8, name="again"))) == expected
    assert driver.engine.store.pinned_bytes == 0


def test_one_tenant_cannot_evict_another_below_its_share(models):
    size = block_bytes(models)
    driver = Driver(models["llama"], prefix_cache={"memory_bytes": 10 * size, "tenant_share": 0.4})
    driver.run(of("small", make_request(TOKENS[:32], new=1, name="small")))
    for number in range(8):
        tokens = random.Random(number).choices(range(VOCABULARY), k=64)
        driver.run(of("large", make_request(tokens, new=1, name=f"large {number}")))
    driver.run(of("small", make_request(TOKENS[:32], new=1, name="again")))
    assert driver.started("again").cached_tokens == 31  # the last one is computed for its logits
    held = {"small": 0, "large": 0}
    for run in driver.engine.store.tree.recent(0):
        held[run.tenant] += len(run.keys) * size
    assert held == {"small": 4 * size, "large": 6 * size}

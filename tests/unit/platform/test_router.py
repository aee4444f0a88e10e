"""What the router records of its decisions: how much it takes to be warm, and how much was."""

from __future__ import annotations

import asyncio
from random import Random

from tests.unit.platform.conftest import Counted
from warmkv.config import load
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.router import Router
from warmkv.policies.dispatcher import KEPT_SECONDS
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.mask_table import pack
from warmkv.replicas.protocol import GenerateRequest, SamplingParams

SIZE = 64
HASHES = tuple(bytes([block]) * 16 for block in range(4))


def request(number: int) -> GenerateRequest:
    return GenerateRequest(str(number), tuple(range(4 * SIZE + 10)), HASHES, SamplingParams(1), PolicySpec())


def test_what_was_expected_is_held_against_what_was_found() -> None:
    seen, now = Counted(), 0.0
    router = Router(load(flags=[f"prefix_cache.block_size={SIZE}"], environ={}), seen, Random(0), lambda: now)
    router._dispatcher.index.add("a", pack(HASHES[:3]))

    async def scenario() -> None:
        nonlocal now
        for number, cached in enumerate((3 * SIZE, SIZE, 3 * SIZE + 10)):
            attempt = Attempt(request(number))
            (best, _) = router.choose(number, attempt, ["a", "b"])
            attempt.replica = best
            attempt.began(cached)
            router.release(number)
            now += KEPT_SECONDS  # the index alone tells what is warm
        attempt = Attempt(request(9))
        router.choose(9, attempt, ["a", "b"])
        attempt.replica = "b"  # the best one did not take it
        attempt.began(0)

    asyncio.run(scenario())
    matches = [(value, labels) for name, value, labels in seen.seen if name == "warmkv_match_share"]
    assert matches == [(0.75, {"reason": "warm"})] * 4
    tokens: dict[str, float] = {}
    for name, value, labels in seen.seen:
        if name == "warmkv_expected_tokens":
            tokens[labels["outcome"]] = tokens.get(labels["outcome"], 0) + value
    assert tokens == {"found": 3 * SIZE + SIZE + 3 * SIZE, "missing": 2 * SIZE, "unexpected": 10}


def test_the_queue_of_a_replica_begins_behind_the_slots_of_its_group() -> None:
    small = ["engine.max_slots=8", "cluster.groups={small: {engine: {max_slots: 1}}}", "routing.load_weight=0"]
    router = Router(load(flags=small, environ={}), Counted(), Random(0), lambda: 0.0)
    router._dispatcher.index.add("a", pack(HASHES))  # four blocks; each request that waits counts as eight

    async def bests(group: str) -> list[str]:
        router.set_slots({"a": group, "b": ""})
        found = [router.choose(number, Attempt(request(number)), ["a", "b"])[0] for number in range(8)]
        for number in range(8):
            router.release(number)
        return found

    assert asyncio.run(bests("")).count("a") == 8
    assert asyncio.run(bests("small")).count("a") < 4

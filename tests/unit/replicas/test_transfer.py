"""Two replicas and what moves between them, without Ray: the same answers and bills, or a prompt that is computed."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine_stream import stream
from tests.tokenizers import of_words
from tests.unit.replicas.conftest import BLOCK, VOCABULARY, make_request, random_model
from warmkv import telemetry
from warmkv.config import Config, EngineConfig, PrefixCacheConfig
from warmkv.policies.transfer import CONCURRENT, Fetch, TransferTerms
from warmkv.replicas import transfer
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.protocol import BlocksWanted, GenerateRequest, Started
from warmkv.replicas.transfer import BlockPayloads, BlocksOffered, Transfers

TOKENS = random.Random(1).choices(range(VOCABULARY), k=61)
DEFAULT = TransferTerms.of(Config())
ALWAYS = {"token_seconds": 100.0, "start_seconds": 0.0, "byte_seconds": 0.0, "timeout_seconds": 60.0}


class Recorded:
    """What was counted and observed, by metric and labels."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()

    def add(self, counter: telemetry.Metric, value: float, **labels: str) -> None:
        self.counts[counter.name, *labels.values()] += value  # type: ignore[assignment]

    def observe(self, histogram: telemetry.Metric, value: float, **labels: str) -> None:
        self.counts[histogram.name, *labels.values()] += 1

    def fetches(self) -> dict[str, int]:
        return {key[1]: count for key, count in self.counts.items() if key[0] == telemetry.FETCHES.name}


class Pair:
    """Replica "b" asks replica "a"; `ask` may be replaced by a fault."""

    def __init__(self, model: Any, transfer: dict[str, Any], caches: Sequence[dict[str, Any]]) -> None:
        terms, self.recorded, self.asked = replace(DEFAULT, **ALWAYS | transfer), Recorded(), 0
        settings = [PrefixCacheConfig(**{"block_size": BLOCK, "min_tokens": 1, **cache}) for cache in caches]
        self.engines = [
            Engine(model, EngineConfig(step_tokens=16, kv_bytes=1 << 26), one, clock=lambda: 0.0, name=name)
            for name, one in zip("ab", settings, strict=True)
        ]
        self.a, self.b = (
            Transfers(engine, engine.name, terms, self._ask, self.recorded, clock=asyncio.get_running_loop().time)
            for engine in self.engines
        )
        self.ask: Callable[[BlocksWanted], Any] = self.a.lend

    async def _ask(self, wanted: BlocksWanted) -> BlockPayloads:
        """As through a network: nothing is shared."""
        self.asked += 1
        lent: BlockPayloads = pickle.loads(pickle.dumps(await self.ask(pickle.loads(pickle.dumps(wanted)))))
        return lent

    async def run(self, at: int, request: GenerateRequest) -> tuple[list[int], Started]:
        """Return the tokens of a request at a replica, and what it said when it started."""
        transfers = (self.a, self.b)[at]
        await transfers.prepare(request)
        text, started = "", None
        async for event in stream(self.engines[at], request, of_words([f"{one}," for one in range(VOCABULARY)])):
            if isinstance(event, Started):
                started = event
                transfers.started(request, event)
            text += getattr(event, "text", "")
        assert started is not None
        return [int(one) for one in text.split(",") if one], started


@asynccontextmanager
async def pair(
    models: Any, transfer: dict[str, Any] | None = None, donor: dict[str, Any] | None = None, **cache: Any
) -> AsyncIterator[Pair]:
    made = Pair(models["llama"], transfer or {}, (cache if donor is None else donor, cache))
    threads = [threading.Thread(target=engine.run) for engine in made.engines]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for engine in made.engines:
            engine.stop()
        for thread in threads:
            await asyncio.to_thread(thread.join)


def second(*, policy: str = "full", name: str = "second", blocks: int = 6) -> GenerateRequest:
    request = make_request(TOKENS, new=12, policy=policy, reads=[53, 48], name=name)
    return replace(request, fetch=Fetch("a", blocks))


def first(policy: str = "full") -> GenerateRequest:
    return make_request(TOKENS[:53], new=1, policy=policy, marks={48: "1h", 53: "5m"}, name="first")


@pytest.mark.parametrize("policy", ["full", "snapkv@20", "h2o@20", "expected_attention@20:window=16"])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_fetched_prefix_answers_and_is_billed_as_on_the_donor(models, policy, piece):
    async def run() -> None:
        async with pair(models, {"piece_bytes": piece}) as replicas:
            await replicas.run(0, first(policy))
            there = await replicas.run(0, second(policy=policy, name="there"))
            here = await replicas.run(1, second(policy=policy))
            assert replicas.recorded.fetches() == {"fetched": 1}
        async with pair(models, enabled=False) as replicas:
            fresh = await replicas.run(0, second(policy=policy))
        assert here[0] == there[0] == fresh[0]
        for told in ("hit", "cached_tokens", "tiers", "written"):
            assert getattr(here[1], told) == getattr(there[1], told)
        assert here[1].cached_tokens > 40

    asyncio.run(run())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", ["full", "h2o@20"])
def test_the_same_between_replicas_on_a_gpu(policy):
    async def run() -> None:
        models = {"llama": prepare(random_model("llama").cuda())}
        async with pair(models, {"piece_bytes": 1}) as replicas:
            await replicas.run(0, first(policy))
            there = await replicas.run(0, second(policy=policy, name="there"))
            here = await replicas.run(1, second(policy=policy))
            assert here[0] == there[0]
            assert (here[1].hit, here[1].cached_tokens) == (there[1].hit, there[1].cached_tokens)
            a, b = (engine.store.places[0].blocks for engine in replicas.engines)
            for key in first().hashes:
                assert b[key].parts[0].is_cuda
                assert torch.equal(b[key].parts[0], a[key].parts[0])
            await replicas.a.hand_over(["b"], nobody, offers(replicas, []))
            assert set(b) >= set(a)

    asyncio.run(run())


def test_fetched_blocks_are_those_of_the_donor_bit_by_bit(models):
    async def run() -> None:
        async with pair(models) as replicas:
            await replicas.run(0, first())
            await replicas.b.prepare(second())
            a, b = (engine.store.places[0].blocks for engine in replicas.engines)
            assert set(b) == set(a)
            assert all(torch.equal(b[key].parts[0], a[key].parts[0]) for key in a)

    asyncio.run(run())


def test_who_wants_the_same_waits_for_one_fetch(models):
    async def run() -> None:
        async with pair(models) as replicas:
            await replicas.run(0, first())
            requests = [second(name=str(number)) for number in range(8)] + [second(name="short", blocks=4)]
            expected, _ = await replicas.run(0, second(name="there"))
            answers = await asyncio.gather(*(replicas.run(1, request) for request in requests))
            assert replicas.asked == 1
            assert replicas.recorded.fetches() == {"fetched": 1}
            assert all(tokens == expected for tokens, _ in answers)
            assert {started.hit for _, started in answers} == {53}

    asyncio.run(run())


def test_who_gives_up_waiting_does_not_stop_the_fetch_for_others(models):
    async def run() -> None:
        async with pair(models) as replicas:
            await replicas.run(0, first())
            asked, go = asyncio.Event(), asyncio.Event()

            async def slowly(wanted: BlocksWanted) -> BlockPayloads:
                asked.set()
                await go.wait()
                return await replicas.a.lend(wanted)

            replicas.ask = slowly
            leaves = asyncio.create_task(replicas.b.prepare(second(name="leaves")))
            await asked.wait()
            stays = asyncio.create_task(replicas.run(1, second(name="stays")))
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
            go.set()
            _, started = await stays
            assert started.hit == 53
            assert replicas.asked == 1

    asyncio.run(run())


async def raises(wanted: BlocksWanted) -> BlockPayloads:
    raise ConnectionError("the donor has died")


async def never(wanted: BlocksWanted) -> BlockPayloads:
    await asyncio.Event().wait()
    raise AssertionError


async def nothing(wanted: BlocksWanted) -> BlockPayloads:
    return BlockPayloads()


def spoilt(replicas: Pair) -> Callable[[BlocksWanted], Any]:
    async def lend(wanted: BlocksWanted) -> BlockPayloads:
        lent = await replicas.a.lend(wanted)
        return replace(lent, payloads=tuple(replace(one, arrays=(one.arrays[0][:-1],)) for one in lent.payloads))

    return lend


def shuffled(replicas: Pair) -> Callable[[BlocksWanted], Any]:
    async def lend(wanted: BlocksWanted) -> BlockPayloads:
        return replace(lent := await replicas.a.lend(wanted), payloads=lent.payloads[::-1], more=True)

    return lend


@pytest.mark.parametrize(
    ("fault", "result"),
    [
        (lambda replicas: raises, "failed"),
        (lambda replicas: never, "late"),
        (lambda replicas: nothing, "empty"),
        (spoilt, "failed"),
        (shuffled, "fetched"),
    ],
)
def test_any_fault_means_computing_and_is_counted(models, fault, result):
    async def run() -> None:
        async with pair(models, {"timeout_seconds": 0.2 if result == "late" else 60.0}) as replicas:
            await replicas.run(0, first())
            expected, _ = await replicas.run(0, second(name="there"))
            replicas.ask = fault(replicas)
            tokens, started = await replicas.run(1, second())
            assert tokens == expected
            assert started.cached_tokens <= 8  # a block that happened to be the first
            assert started.hit == 0
            assert replicas.recorded.fetches() == {result: 1}
            replicas.ask = replicas.a.lend
            assert replicas.b._flights == {}

    asyncio.run(run())


def test_a_replica_that_keeps_kv_as_computed_takes_none_that_was_made_smaller(models):
    async def run() -> None:
        async with pair(models, donor={"storage": "fp8"}) as replicas:
            expected, _ = await replicas.run(1, replace(second(name="computed"), fetch=None))
            await asyncio.wrap_future(replicas.engines[1].drop_prefixes(""))
            await replicas.run(0, first())
            tokens, started = await replicas.run(1, second())
            assert (tokens, started.cached_tokens) == (expected, 0)
            assert replicas.recorded.fetches() == {"failed": 1}
        async with pair(models, storage="fp8") as replicas:
            await replicas.run(0, first())
            there, here = await replicas.run(0, second(name="there")), await replicas.run(1, second())
            assert here[0] == there[0]
            assert here[1].hit == there[1].hit == 53
            assert replicas.recorded.fetches() == {"fetched": 1}

    asyncio.run(run())


def test_kv_of_other_weights_is_not_lent(models):
    async def run() -> None:
        async with pair(models) as replicas:
            await replicas.run(0, first())
            replicas.engines[1].store.identity = replace(replicas.engines[1].store.identity, weights="others")
            _, started = await replicas.run(1, second())
            assert started.cached_tokens == 0
            assert replicas.recorded.fetches() == {"empty": 1}

    asyncio.run(run())


def test_a_replica_asks_nobody_for_what_it_has_or_computes_faster(models):
    async def run() -> None:
        async with pair(models) as replicas:
            await replicas.run(0, first())
            await replicas.run(0, second(name="itself"))
            await replicas.b.prepare(replace(second(), fetch=None))
            await replicas.run(1, first())
            await replicas.b.prepare(second())  # has it by now
            assert (replicas.asked, replicas.recorded.fetches()) == (0, {})
        async with pair(models, {"token_seconds": 1e-9, "start_seconds": 1.0}) as replicas:
            await replicas.run(0, first())
            await replicas.b.prepare(second())
            assert (replicas.asked, replicas.recorded.fetches()) == (0, {"slower": 1})
            await replicas.b.prepare(replace(second(), fetch=Fetch("a", 6, always=True)))
            assert replicas.recorded.fetches() == {"slower": 1, "fetched": 1}
        async with pair(models, enabled=False) as replicas:
            await replicas.b.prepare(second())
            assert await replicas.a.lend(BlocksWanted("a", {}, (), 0, (), False)) == BlockPayloads()
            assert replicas.asked == 0

    asyncio.run(run())


def test_a_replica_learns_its_own_speed(models):
    async def run() -> None:
        async with pair(models) as replicas:
            guess = replicas.b.times
            await replicas.run(0, first())
            await replicas.run(1, second())
            assert replicas.b.times.fetch != guess.fetch
            assert replicas.b.times.prefill != guess.prefill
            assert replicas.a.times.fetch == guess.fetch

    asyncio.run(run())


def test_only_so_many_fetches_run_at_a_time(models):
    async def run() -> None:
        async with pair(models) as replicas:
            running, most = 0, 0
            for number in range(6):
                await replicas.run(0, make_request([number, *TOKENS], new=1, name=f"write {number}"))

            async def lend(wanted: BlocksWanted) -> BlockPayloads:
                nonlocal running, most
                running, most = running + 1, max(most, running + 1)
                lent = await replicas.a.lend(wanted)
                running -= 1
                return lent

            replicas.ask = lend
            wanted = [make_request([number, *TOKENS], name=str(number)) for number in range(6)]
            await asyncio.gather(*(replicas.b.prepare(replace(one, fetch=Fetch("a", 7))) for one in wanted))
            assert most == CONCURRENT
            assert replicas.recorded.fetches() == {"fetched": 6}

    asyncio.run(run())


# --- a replica that leaves


async def nobody(keys: Sequence[bytes]) -> Mapping[bytes, Sequence[str]]:
    return {}


def offers(replicas: Pair, seen: list[BlocksOffered]) -> Callable[[BlocksOffered], Any]:
    async def offer(offered: BlocksOffered) -> int:
        seen.append(offered)
        return await replicas.b.take_over(pickle.loads(pickle.dumps(offered)))

    return offer


def written(tokens: list[int], name: str) -> GenerateRequest:
    return make_request(tokens, new=1, name=name, marks={len(tokens): "1h"})


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_what_a_replica_hands_over_is_read_and_billed_as_it_was_there(models, piece):
    async def run() -> None:
        async with pair(models, {"piece_bytes": piece}) as replicas:
            prompts = [[number, *TOKENS] for number in range(5)] + [[1, *TOKENS[:30], 5, 6, 7]]
            for number, tokens in enumerate(prompts):
                await replicas.run(0, written(tokens, f"write {number}"))
            seen: list[BlocksOffered] = []
            taken = await replicas.a.hand_over(["b"], nobody, offers(replicas, seen))
            assert taken == len(replicas.engines[0].store) == len(replicas.engines[1].store)
            assert len(seen) > 3 if piece == 1 else len(seen) == 1
            assert replicas.recorded.counts[telemetry.HANDED_BYTES.name,] == replicas.engines[0].store.resident_bytes
            for number, tokens in enumerate(prompts):
                request = make_request(tokens, reads=[len(tokens)], name=f"read {number}")
                there, here = await replicas.run(0, request), await replicas.run(1, request)
                assert here[0] == there[0]
                assert here[1].hit == there[1].hit == len(tokens)
                assert here[1].cached_tokens == there[1].cached_tokens

    asyncio.run(run())


def test_the_hottest_chains_go_first_and_no_more_than_the_limit(models, monkeypatch):
    limit = 16 * BLOCK * models["llama"].kv_shape.token_bytes
    monkeypatch.setattr(transfer, "HANDOVER_BYTES", limit)

    async def run() -> None:
        async with pair(models) as replicas:
            requests = [make_request([number, *TOKENS], new=1, name=str(number)) for number in range(4)]
            for request in requests:
                await replicas.run(0, request)
            await replicas.run(0, replace(requests[1], id="again"))
            await replicas.a.hand_over(["b"], nobody, offers(replicas, []))
            store = replicas.engines[1].store
            assert [store.leading(request.hashes)[0] for request in requests] == [0, 7, 2, 7]
            assert store.resident_bytes == limit

    asyncio.run(run())


def test_what_another_replica_holds_is_left_out_and_the_rest_goes_there(models):
    async def run() -> None:
        async with pair(models) as replicas:
            request = written(TOKENS, "all")
            await replicas.run(0, request)
            await replicas.run(1, make_request(TOKENS[:32], new=1, name="beginning"))

            async def holders(keys: Sequence[bytes]) -> Mapping[bytes, Sequence[str]]:
                return {key: ["b"] for key in request.hashes[:4]}

            seen: list[BlocksOffered] = []
            assert await replicas.a.hand_over(["b", "c", "d"], holders, offers(replicas, seen)) == 4
            assert [(one.replica, len(one.payloads)) for one in seen] == [("b", 4)]  # three blocks and the tail
            _, started = await replicas.run(1, make_request(TOKENS, reads=[61], name="read"))
            assert started.hit == 61

    asyncio.run(run())


def test_what_a_replica_fails_to_take_goes_to_the_others(models):
    async def run() -> None:
        async with pair(models, {"piece_bytes": 1}) as replicas:
            for number in range(12):
                await replicas.run(0, written([number, *TOKENS[:15]], str(number)))
            asked: Counter[str] = Counter()

            async def offer(offered: BlocksOffered) -> int:
                asked[offered.replica] += 1
                if offered.replica == "dead":
                    raise ConnectionError
                return await replicas.b.take_over(offered)

            taken = await replicas.a.hand_over(["b", "dead"], nobody, offer)
            assert asked["dead"] == 1
            assert taken == len(replicas.engines[1].store) == len(replicas.engines[0].store) == 24

    asyncio.run(run())


def test_handing_over_ends_with_its_time(models):
    async def run() -> None:
        async with pair(models, {"handover_seconds": 0.1}) as replicas:
            await replicas.run(0, written(TOKENS, "all"))

            async def offer(offered: BlocksOffered) -> int:
                await asyncio.Event().wait()
                return 0

            assert await replicas.a.hand_over(["b"], nobody, offer) == 0

    asyncio.run(run())


def test_nothing_is_taken_over_from_a_replica_with_other_weights(models):
    async def run() -> None:
        async with pair(models) as replicas:
            await replicas.run(0, written(TOKENS, "all"))
            replicas.engines[1].store.identity = replace(replicas.engines[1].store.identity, weights="others")
            assert await replicas.a.hand_over(["b"], nobody, offers(replicas, [])) == 0
            assert len(replicas.engines[1].store) == 0

    asyncio.run(run())


def test_what_nobody_waits_for_any_more_is_not_done_between_steps(driver):
    engine, done = driver().engine, []
    given_up, wanted = engine.between_steps(lambda: done.append("given up")), engine.between_steps(lambda: 7)
    failing = engine.between_steps(lambda: 1 // 0)
    given_up.cancel()
    engine.step()
    assert (done, wanted.result(0)) == ([], 7)
    with pytest.raises(ZeroDivisionError):
        failing.result(0)

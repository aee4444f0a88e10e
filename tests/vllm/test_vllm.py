"""warmkv over a real vLLM: what the directory knows of its cache, answers, ends and faults."""

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.polling import PATIENCE, until
from tests.vllm.conftest import (
    BLOCK,
    BLOCKS,
    ROOTS,
    TOKEN_BYTES,
    Replica,
    end,
    started,
    started_replica,
    text_of,
    tokens_of,
    true,
    with_resume,
)
from warmkv.config import EngineConfig, PrefixCacheConfig, SimulatorConfig
from warmkv.model_shape import ModelShape
from warmkv.prefixes import hashing
from warmkv.prefixes.record import RequestRecord
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engines.kv_events import BlocksStored, decode
from warmkv.replicas.loading.load import load_model
from warmkv.replicas.protocol import Constraint, Event, Failed, Finished, Started, TokenLogprobs
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts
from warmkv.simulator.studies.replays.verify import verify

pytest.importorskip("vllm", reason="make test-vllm")

REQUESTS, PROBES = 500, 200


def test_the_directory_knows_what_vllm_would_find_to_the_block(replica: Replica):
    """Random prompts of two tenants with shared beginnings, four times what the cache holds; then probes."""
    random_numbers = random.Random(5)
    known: list[tuple[int, list[int]]] = []

    def prompt() -> tuple[int, list[int]]:
        if known and random_numbers.random() < 0.6:
            root, before = random_numbers.choice(known[-30:])
            tokens = before[: random_numbers.randrange(1, len(before) + 1)]
        else:
            root, tokens = random_numbers.randrange(2), []
        tokens = [*tokens, *(random_numbers.randrange(5, 250) for _ in range(random_numbers.randrange(1, 150)))][:400]
        known.append((root, tokens))
        return root, tokens

    async def ask(count: int) -> None:
        requests = [
            replica.request(tokens, new=random_numbers.randrange(1, 4), root=root)
            for root, tokens in (prompt() for _ in range(count))
        ]
        await asyncio.gather(*map(replica.events, requests))

    for _ in range(REQUESTS // 4):
        replica.run(ask(4))
    assert replica.engine.store.left["device", "evicted"] > 100
    differ = []
    for _ in range(PROBES):
        replica.run(replica.heard())
        root, tokens = random_numbers.choice(known[-60:])
        tokens = [*tokens, 7]
        keys = hashing.block_hashes(tokens[: (len(tokens) - 1) // BLOCK * BLOCK], BLOCK, ROOTS[root])
        leading = next((at for at, key in enumerate(keys) if key not in replica.directory), len(keys))
        found = started(replica.answer(replica.request(tokens, 1, root=root))).cached_tokens
        if found != leading * BLOCK:
            differ.append((found, leading * BLOCK))
    assert differ == []


def test_a_replay_of_recorded_requests_finds_what_vllm_found(replica: Replica):
    """Conversations of two tenants that need more than the cache holds, one request after the other."""
    random_numbers = random.Random(3)
    replica.run(replica.engine._reset())
    records: list[RequestRecord] = []
    said: list[tuple[int, list[int]]] = []
    for number in range(60):
        root, before = random_numbers.choice(said[-12:]) if number % 4 else (number % 3 % 2, [])
        tokens = [*before, *random_numbers.choices(range(5, 250), k=random_numbers.randrange(1, 70))][:400]
        request = replica.request(tokens, random_numbers.randrange(1, 60), ignore_eos=True, root=root)
        answer = replica.answer(request)
        whole = [*tokens, *tokens_of(answer)]
        said.append((root, whole[:400]))
        generated = hashing.block_hashes(whole[:-1], BLOCK, ROOTS[root])[len(request.hashes) :]
        until(lambda keys={*request.hashes, *generated}: keys <= set(replica.directory), "vLLM has told of its blocks")
        records.append(
            RequestRecord(
                id=request.id,
                arrival=1e9 + number * 10.0,
                tenant=request.tenant,
                model="tiny",
                api="chat",
                policy="full",
                block_size=BLOCK,
                input_tokens=len(tokens),
                output_tokens=len(whole) - len(tokens),
                hashes=request.hashes,
                generated=tuple(generated),
                replica="replica",
                cached_tokens=started(answer).cached_tokens,
            )
        )
    shape = {"layers": 6, "kv_heads": 2, "head_dim": 32, "dtype_bytes": 4}
    config = replica.config.model_copy(update={"simulator": SimulatorConfig(model=ModelShape(**shape))})
    cost = StepCost(1e-3, 1e-5, 0.0)
    verdict = verify(records, config, UniformCosts(PhaseCosts(cost, cost)))
    assert verdict.evictions > BLOCKS
    assert (verdict.equal_hits, verdict.refused) == (1.0, 0)
    assert verdict.live_hit_tokens > 0


def test_greedy_answers_and_log_probabilities_are_those_of_warmkv_s_engine(replica: Replica):
    cache = PrefixCacheConfig(block_size=BLOCK)
    own = Engine(load_model(replica.config.model), EngineConfig(), cache, clock=time.monotonic)
    text = "The meeting of the council began at noon. Its minutes name five members. "
    for number, asked in enumerate(("What began?", "Who is named?", "When did it begin?")):
        tokens = replica.tokenizer.encode(text * (number + 1) + asked)
        request = replica.request(tokens, 24, logprobs=3)
        told: list[object] = []
        own.submit(replace(request, id="own"), told.append)
        while own.step():
            pass
        drawn = [event for event in told if isinstance(event, TokenLogprobs)]
        answer = replica.answer(request)
        assert tokens_of(answer) == [event.token for event in drawn]
        found = [
            entry for event in answer if not isinstance(event, Started) for entry in getattr(event, "logprobs", ())
        ]
        assert np.allclose([one.logprob for one in found], [one.logprob for one in drawn], atol=1e-3)
        assert [[token for token, _ in one.top] for one in found] == [[token for token, _ in one.top] for one in drawn]
        ours = told[-1]
        assert isinstance(ours, Finished)
        assert end(answer).reason == ours.reason  # type: ignore[union-attr]
        assert end(answer).output_tokens == ours.output_tokens  # type: ignore[union-attr]


def test_tenants_find_nothing_of_each_other_and_marks_are_read_where_they_were_written(replica: Replica):
    tokens = random.Random(9).choices(range(5, 250), k=150)
    first = started(replica.answer(replica.request(tokens, marks={100: "5m"})))
    assert (first.hit, first.written, first.cached_tokens) == (0, 100, 0)
    again = started(replica.answer(replica.request(tokens, marks={100: "5m"})))
    assert (again.hit, again.written, again.cached_tokens) == (100, 100, 128)
    other = started(replica.answer(replica.request(tokens, marks={100: "5m"}, root=1)))
    assert (other.hit, other.cached_tokens) == (0, 0)


def test_a_tenant_waits_for_one_request_of_another_who_asked_for_much(replica: Replica):
    """Twelve long answers of one tenant, of which four decode together, then one of another."""
    numbers, begun = random.Random(29), list[str]()

    async def ask() -> None:
        async def answer(root: int) -> None:
            request = replica.request(numbers.choices(range(5, 250), k=40), 40, root=root, ignore_eos=True)

            def told(event: Event) -> None:
                if isinstance(event, Started):
                    begun.append(request.tenant)

            await asyncio.wait([replica.outputs.submit(request, told).ended])

        await asyncio.gather(*(answer(root) for root in [0] * 12 + [1]))

    replica.run(ask())
    assert begun.count("0") == 12
    assert begun.index("1") <= 5
    assert not len(replica.engine._waiting)


def test_of_those_that_wait_the_one_whose_prompt_is_warm_begins_first(replica: Replica):
    """Four long answers decode, a cold prompt waits for one of them to end, and then a warm one as long."""
    numbers, begun = random.Random(31), list[str]()
    warm = numbers.choices(range(5, 250), k=130)
    replica.answer(replica.request(warm, marks={130: "5m"}))
    replica.run(replica.heard())

    async def ask() -> None:
        async def answer(name: str, tokens: list[int], new: int) -> None:
            def told(event: Event) -> None:
                if isinstance(event, Started):
                    begun.append(name)

            request = replica.request(tokens, new, ignore_eos=True)
            await asyncio.wait([replica.outputs.submit(request, told).ended])

        long = [answer("long", numbers.choices(range(5, 250), k=10), 40) for _ in range(4)]
        cold = answer("cold", numbers.choices(range(5, 250), k=130), 4)
        await asyncio.gather(*long, cold, answer("warm", [*warm, 7], 4))

    replica.run(ask())
    assert begun == ["long"] * 4 + ["warm", "cold"]


def test_a_prefix_with_a_mark_is_kept_warm_and_another_is_evicted(replica: Replica):
    """Five times what the cache holds comes between two requests for each."""
    numbers = random.Random(23)
    marked, other = (numbers.choices(range(5, 250), k=150) for _ in range(2))
    replica.answer(replica.request(marked, 1, marks={150: "1h"}))
    replica.answer(replica.request(other, 1))
    touched = replica.engine.stats().touched
    for _ in range(5 * BLOCKS // 6):
        replica.answer(replica.request(numbers.choices(range(5, 250), k=5 * BLOCK), 1))
        replica.run(replica.heard())
    assert replica.engine.stats().touched > touched + 5
    assert started(replica.answer(replica.request(other, 1))).cached_tokens == 0
    again = started(replica.answer(replica.request(marked, 1, marks={150: "1h"})))
    assert (again.hit, again.cached_tokens) == (150, 128)


def test_prefixes_that_are_dropped_are_not_found(replica: Replica):
    tokens = random.Random(11).choices(range(5, 250), k=100)
    replica.answer(replica.request(tokens))
    assert started(replica.answer(replica.request(tokens))).cached_tokens == 96

    async def drop() -> int:
        dropped: int = await asyncio.wrap_future(replica.engine.drop_prefixes("0"))
        return dropped

    assert replica.run(drop()) > 0
    assert not set(hashing.block_hashes(tokens, BLOCK, ROOTS[0])) & set(replica.directory)
    assert started(replica.answer(replica.request(tokens))).cached_tokens == 0
    assert started(replica.answer(replica.request(tokens))).cached_tokens == 96


@pytest.mark.soak
def test_a_cache_in_fp8_holds_four_times_the_blocks_of_float32_and_serves_full_fp8():
    """Starts a vLLM of its own, so it does not run with the others."""
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's attention on a CPU reads fp8 with AVX-512 or AMX")
    replica = started_replica("fp8", "full+fp8")
    try:
        block_bytes = BLOCK * TOKEN_BYTES // 4
        assert replica.engine.store.tier_limits["device"] == 4 * BLOCKS * block_bytes
        tokens = random.Random(17).choices(range(5, 250), k=200)
        answers = [replica.answer(replica.request(tokens, 4, ignore_eos=True)) for _ in range(2)]
        assert [started(answer).cached_tokens for answer in answers] == [0, 192]
        assert [end(answer) for answer in answers] == [Finished("length", 4)] * 2
        replica.run(replica.heard())
        assert replica.engine.stats().store_bytes == len(replica.directory) * block_bytes
    finally:
        replica.close()


def test_stop_strings_seeds_and_limits(replica: Replica):
    tokens = replica.tokenizer.encode("The council met in the hall. The council met in")
    whole = text_of(replica.answer(replica.request(tokens, 12)))
    stop = whole[3:6]
    answer = replica.answer(replica.request(tokens, 12, stop=(stop,)))
    assert text_of(answer) == whole[: whole.index(stop)]
    assert end(answer).reason == "stop"  # type: ignore[union-attr]
    drawn = [tokens_of(replica.answer(replica.request(tokens, 12, temperature=1.5, seed=seed))) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert end(replica.answer(replica.request(tokens, 0))) == Finished("length", 0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[0-9]{3}-[0-9]{2}"),
        ("choice", '["yes", "perhaps"]'),
        ("json_schema", '{"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}'),
        ("grammar", 'start: "ab" "c"'),
    ],
)
def test_constrained_answers(replica: Replica, kind, text):
    tokens = replica.tokenizer.encode("Answer:")
    said = text_of(replica.answer(replica.request(tokens, 60, constraint=Constraint(kind, text))))
    if kind == "regex":
        assert [len(part) for part in said.split("-")] == [3, 2]
    elif kind == "choice":
        assert said in ("yes", "perhaps")
    elif kind == "json_schema":
        assert isinstance(json.loads(said)["n"], bool)
    else:
        assert said == "abc"


def test_what_vllm_refuses_is_told_as_a_refusal(replica: Replica):
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    tokens = replica.tokenizer.encode("Answer:")
    for constraint in (Constraint("json_schema", json.dumps(schema)), Constraint("regex", "a\x00")):
        refused = end(replica.answer(replica.request(tokens, 8, constraint=constraint)))
        assert isinstance(refused, Failed)
        assert refused.fault == "refused", refused.message
    all_tokens = replica.request(tokens, 8, temperature=1.0, top_k=1 << 64, ignore_eos=True)
    assert len(tokens_of(replica.answer(all_tokens))) > 0


def test_what_another_replica_drew_is_gone_on_from(replica: Replica):
    tokens = replica.tokenizer.encode("The council met in the hall. The council met in")
    request = replica.request(tokens, 12)
    whole = tokens_of(replica.answer(request))
    resumed = replica.answer(with_resume(replica.request(tokens, 12), whole[:5]))
    assert tokens_of(resumed) == whole
    assert end(resumed) == Finished("length", 12)


def test_a_request_that_is_cancelled_ends_in_vllm(replica: Replica):
    async def scenario() -> None:
        told: list[object] = []
        output = replica.outputs.submit(replica.request(list(range(5, 60)), 400, ignore_eos=True), told.append)
        await true(lambda: len(told) >= 4)
        replica.outputs.cancel(output)
        vllm = replica.engine._llm.output_processor
        await true(lambda: not vllm.has_unfinished_requests() and not replica.engine._tasks)
        assert len(told) < 300
        replica.engine.check_turning(PATIENCE)

    replica.run(scenario())


@pytest.mark.parametrize("kept", [True, False])
def test_lost_events_are_replayed_or_the_cache_is_cleared(replica: Replica, monkeypatch, kept: bool):
    """Batches are dropped on their way; vLLM still has them, or does not any more."""
    stream, arrived = replica.engine.stream, replica.engine.stream.arrived
    lost: list[int] = []

    async def dropped(number: int, payload: bytes) -> None:
        if any(isinstance(event, BlocksStored) and event.token_ids[0] == tokens[0] for event in decode(payload)):
            lost.append(number)
        else:
            await arrived(number, payload)

    async def gone(first: int) -> list[tuple[int, bytes]]:
        return []

    tokens = random.Random(13 + kept).choices(range(5, 250), k=200)
    keys = hashing.block_hashes(tokens, BLOCK, ROOTS[0])
    replica.run(replica.heard())
    resets = stream.resets
    monkeypatch.setattr(stream, "arrived", dropped)
    replica.answer(replica.request(tokens, 1))
    until(lambda: lost)
    monkeypatch.setattr(stream, "arrived", arrived)
    if not kept:
        monkeypatch.setattr(stream, "_replay", gone)
    assert not set(keys) & set(replica.directory)
    replica.answer(replica.request(tokens[::-1], 1))  # of whose events the gap is seen
    until(lambda: stream._next > lost[-1] + 1)
    replica.run(replica.heard())
    assert stream.resets == resets + (not kept)
    assert set(keys) <= set(replica.directory) if kept else not set(keys) & set(replica.directory)
    found = started(replica.answer(replica.request([*tokens, 3], 1))).cached_tokens
    assert found == (len(keys) * BLOCK if kept else 0)


def test_an_engine_whose_process_is_killed_fails_what_it_had_and_its_health_check(replica: Replica):
    async def scenario() -> None:
        told: list[object] = []
        output = replica.outputs.submit(replica.request(list(range(5, 60)), 400, ignore_eos=True), told.append)
        await true(lambda: len(told) >= 4)
        for process in replica.engine._llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            ended = await output.ended
        assert ended.fault == "replica"
        with pytest.raises(RuntimeError, match="engine core has ended"):
            replica.engine.check_turning(PATIENCE)

    replica.run(scenario())

"""The engine over a vLLM that answers as it is told: its events, refusals, ends and health. Without vLLM."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.polling import PATIENCE
from tests.unit.replicas.conftest import make_request
from warmkv.config import EngineConfig, PrefixCacheConfig, parse
from warmkv.models import tiny
from warmkv.policies.batching import PASSES
from warmkv.policies.keep_warm import KeptPrefix
from warmkv.policies.memory_plan import ModelSizes
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.slot_sizes import KVShape
from warmkv.replicas.engines import vllm_engine, vllm_start
from warmkv.replicas.engines.kv_events import BlocksStored
from warmkv.replicas.engines.ledger import PrefixLedger
from warmkv.replicas.engines.vllm_engine import VllmEngine
from warmkv.replicas.engines.vllm_requests import sampling_fields
from warmkv.replicas.engines.vllm_start import Model, Steps
from warmkv.replicas.protocol import (
    Constraint,
    Failed,
    Finished,
    QueueFullError,
    Started,
    ThinkingBudget,
    TokenLogprobs,
    UnservableRequestError,
)

EOS = 2
MODEL = Model(
    Path("model"), torch.device("cpu"), torch.float32, ModelSizes(10, KVShape(1, 1, 4, 4, 1), 8, 8, 100), 64, {EOS}
)


def output(*tokens: int, finish: str | None = None, logprobs: Any = None, cached: int = 0) -> Any:
    part = SimpleNamespace(token_ids=tokens, finish_reason=finish, stop_reason=None, logprobs=logprobs)
    times = SimpleNamespace(queued_ts=1.0, scheduled_ts=2.0, first_token_ts=5.0)
    return SimpleNamespace(outputs=[part], num_cached_tokens=cached, finished=finish is not None, metrics=times)


class ClientError(Exception):
    """Stand for vLLM's VLLMClientError."""


class GenerateError(Exception):
    """Stand for vLLM's EngineGenerateError, around `cause`."""

    def __init__(self, cause: Exception) -> None:
        self.__cause__ = cause


class Setup:
    """An engine whose vLLM gives the outputs that are put for a request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now, self.flushes = 0.0, 0
        self.outputs: dict[str, asyncio.Queue[Any]] = {}
        self.aborted: list[str] = []
        self.sent: list[Any] = []
        self.priorities: list[int] = []
        self.llm = SimpleNamespace(errored=False, shutdown=lambda: None)
        monkeypatch.setattr(vllm_engine, "generate", self.generate)
        for module, raised in (
            ("vllm.exceptions", SimpleNamespace(VLLMClientError=ClientError)),
            ("vllm.v1.engine.exceptions", SimpleNamespace(EngineGenerateError=GenerateError)),
        ):
            monkeypatch.setitem(sys.modules, module, raised)
        config = EngineConfig(kind="vllm", **settings)
        ledger = PrefixLedger(16, 1, 1000, Lifetimes.of(PrefixCacheConfig()), self.clock, lambda *_: None)
        self.steps = Steps(self.clock)
        self.engine = VllmEngine(self.llm, config, MODEL, ledger, self.steps, Path("/gone"), "r", self.clock)
        self.engine.flush = self.flushed

    def clock(self) -> float:
        return self.now

    def flushed(self) -> None:
        self.flushes += 1

    async def generate(self, llm: Any, request: Any, salt: str, eos_ids: Any, priority: int) -> AsyncIterator[Any]:
        self.sent.append((request, salt))
        self.priorities.append(priority)
        queue = self.outputs.setdefault(request.id, asyncio.Queue())
        try:
            while True:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                yield found
                if found.finished:
                    return
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise

    def ask(self, name: str = "a", tokens: int = 20, **more: Any) -> list[Any]:
        told: list[Any] = []
        request = make_request(list(range(3, 3 + tokens)), name=name, block=16, **more)
        self.engine.submit(replace(request, root=bytes(16)), told.append)
        return told

    def put(self, name: str, *outputs: Any) -> None:
        for found in outputs:
            self.outputs.setdefault(name, asyncio.Queue()).put_nowait(found)


async def turns() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def test_an_answer_is_told_as_warmkv_s_own_engine_does(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        told = here.ask()
        here.put("a", output(7, cached=16), output(8, 9), output(EOS, finish="stop"))
        await turns()
        started = Started("r", 0, 0, 0, 20, 640, 0.0, 3.0)
        assert told == [started, 7, 8, 9, Finished("end", 4)]
        assert 0 < here.flushes <= 3
        assert here.sent[0][1] == bytes(16).hex()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "outputs", "tokens", "end"),
    [
        ({"new": 2}, [output(7), output(8, finish="length")], [7, 8], Finished("length", 2)),
        ({"new": 0}, [output(7, finish="length")], [], Finished("length", 0)),
        ({"stop_token_ids": (9,)}, [output(7), output(9, finish="stop")], [7], Finished("stop", 2)),
        (
            {"ignore_eos": True, "stop_token_ids": (EOS,)},
            [output(7, EOS, finish="stop")],
            [7],
            Finished("stop", 2),
        ),
        ({}, [output(7), output(finish="abort")], [7], Finished("cancelled", 1)),
        ({}, [output(7), output(finish="error")], [7], Failed("vLLM ended the answer by 'error'")),
    ],
)
def test_ends(monkeypatch, options, outputs, tokens, end):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        told = here.ask(**options)
        here.put("a", *outputs)
        await turns()
        assert told[1:] == [*tokens, end]
        assert here.engine.stats().waiting == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "errored", "end", "counted"),
    [
        (ClientError("too deep"), False, Failed("too deep", "refused"), (0, 0)),
        (GenerateError(OverflowError("too big")), False, Failed("OverflowError: too big", "request"), (1, 0)),
        (GenerateError(ValueError("of no request")), True, Failed("ValueError: of no request"), (0, 1)),
        (GenerateError(RuntimeError("lost")), False, Failed("RuntimeError: lost"), (0, 1)),
        (RuntimeError("dead"), True, Failed("RuntimeError: dead"), (0, 1)),
    ],
)
def test_what_vllm_refuses_is_the_request_s_fault(monkeypatch, error, errored, end, counted):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        told = here.ask()
        here.llm.errored = errored
        here.put("a", error)
        await turns()
        assert told == [end]
        assert here.engine.stats().failures == dict(zip(("request", "device"), counted, strict=True))

    asyncio.run(scenario())


def test_log_probabilities_are_the_highest_with_their_tokens(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        told = here.ask(logprobs=2, new=1)
        ranked = {7: (3, -3.0), 5: (1, -0.5), 6: (2, float("-inf"))}
        found = {token: SimpleNamespace(rank=rank, logprob=value) for token, (rank, value) in ranked.items()}
        here.put("a", output(7, finish="length", logprobs=[found]))
        await turns()
        assert told[1] == TokenLogprobs(7, -3.0, ((5, -0.5), (6, -9999.0)))

    asyncio.run(scenario())


def test_what_another_replica_drew_is_part_of_the_prompt_and_told_again(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        told: list[Any] = []
        request = replace(make_request(list(range(3, 23)), new=4, block=16, seed=5), resume=(7, 8), root=bytes(16))
        here.engine.submit(request, told.append)
        here.put("request", output(9), output(10, finish="length"))
        await turns()
        assert told[1:] == [7, 8, 9, 10, Finished("length", 4)]
        fields = sampling_fields(request, [EOS])
        assert (fields["max_tokens"], fields["stop_token_ids"], fields["seed"]) == (2, [EOS], 5)
        constrained = replace(request, sampling=replace(request.sampling, constraint=Constraint("regex", "a")))
        with pytest.raises(UnservableRequestError, match="that another replica began"):
            here.engine.submit(constrained, told.append)

    asyncio.run(scenario())


def test_what_vllm_cannot_serve_is_refused_at_once(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        for refused, why in (
            ({"policy": "snapkv@0.2"}, "kind vllm"),
            ({"new": 60}, "exceed the context of 64"),
            ({"tokens": 99}, "below the vocabulary of 100"),
            ({"stop_token_ids": (100,)}, "stop_token_ids: 100"),
            ({"logit_bias": ((200, 1.0),)}, "logit_bias: 200"),
            ({"prompt_logprobs": 1}, "prompt_logprobs cannot be had from an engine of kind vllm"),
            ({"thinking": ThinkingBudget(5, 1, 2)}, "thinking budgets cannot be had from an engine of kind vllm"),
        ):
            with pytest.raises(UnservableRequestError, match=why):
                here.ask(**refused)
        assert here.sent == []

    asyncio.run(scenario())


def test_a_full_queue_is_said_with_the_time_until_there_is_room(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch, max_slots=1, max_queue=1)
        here.ask("a")
        here.ask("b")
        with pytest.raises(QueueFullError, match="1 requests are waiting already") as full:
            here.ask("c")
        assert (full.value.waiting, full.value.retry_after) == (1, None)
        here.now = 4.0
        here.put("a", output(7, finish="length"))
        await turns()
        here.ask("d")
        with pytest.raises(QueueFullError) as full:
            here.ask("e")
        assert full.value.retry_after == 4.0
        here.engine.stop()
        await turns()

    asyncio.run(scenario())


def test_while_vllm_ends_the_event_loop_goes_on(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        told = here.ask("a")
        await turns()
        ended = threading.Event()
        here.llm.shutdown = lambda: ended.wait(PATIENCE)
        stopping = asyncio.create_task(asyncio.to_thread(here.engine.stop))
        while not here.aborted:  # noqa: ASYNC110 - its task is cancelled in a turn
            await asyncio.sleep(0)
        assert not stopping.done()
        await turns()
        assert (told, here.flushes) == ([Failed("the replica is stopping")], 1)
        ended.set()
        await stopping

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_is_aborted_and_says_nothing_more(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        told = here.ask("a")
        here.put("a", output(7))
        await turns()
        here.engine.cancel("a")
        here.engine.cancel("unknown")
        await turns()
        here.put("a", output(8, finish="length"))
        await turns()
        assert (told[1:], here.aborted) == ([7], ["a"])

    asyncio.run(scenario())


def test_health_is_that_of_vllm_and_of_its_steps(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        here.now = 100.0
        here.engine.check_turning(10)  # idle
        here.ask()
        await turns()
        here.engine.check_turning(10)
        here.now = 111.0
        with pytest.raises(RuntimeError, match="one step for 11 s"):
            here.engine.check_turning(10)
        waiting = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=0, kv_cache_usage=0.5)
        here.steps.record(waiting, SimpleNamespace(num_preempted_reqs=2))
        here.engine.check_turning(10)
        stats = here.engine.stats()
        assert (here.engine.turns, stats.decoding, stats.slot_bytes, stats.preempted) == (1, 1, 500, 2)
        assert stats.preempted_for == "memory"
        here.llm.errored = True
        with pytest.raises(RuntimeError, match="engine core has ended"):
            here.engine.check_turning(10)
        here.engine.stop()
        await turns()

    asyncio.run(scenario())


def test_blocks_of_running_requests_are_no_memory_of_prefixes_as_well(monkeypatch):
    """Publish full blocks of prompts that run, as vLLM does: 20 of 16 bytes, where all but 100 of 1000 are used."""

    async def scenario() -> None:
        here = Setup(monkeypatch)
        names = tuple(bytes([name]) for name in range(20))
        here.engine.store.take([BlocksStored(names, None, tuple(range(320)), 16, bytes(16).hex(), "GPU")])
        assert (here.engine.stats().slot_bytes, here.engine.stats().store_bytes) == (0, 320)
        running = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=0, kv_cache_usage=0.9)
        here.steps.record(running, None)
        stats = here.engine.stats()
        assert (stats.slot_bytes, stats.store_bytes, stats.store_tiers) == (900, 100, {"device": 320})

    asyncio.run(scenario())


def test_what_vllm_is_started_with_follows_from_the_settings_and_the_model():
    config = parse({"engine": {"kind": "vllm", "max_context": 512}})
    model = vllm_start.read_model(config)
    assert (model.folder, model.dtype, model.max_context) == (tiny.PATH, torch.float32, 512)
    assert model.sizes.shape.token_bytes == 6 * 2 * 32 * 2 * 4
    with pytest.raises(ValueError, match="exceeds the model's"):
        vllm_start.read_model(parse({"engine": {"max_context": 1 << 20}}))
    odd = parse({"prefix_cache": {"block_size": 48}, "engine": {"kind": "vllm"}})
    with pytest.raises(ValueError, match="block_size 48 must be a multiple of 32"):
        vllm_start.start_llm(odd, model, None, 1, Path("/gone"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("storage", "entry"), [("fp8", 2 * 32), ("int4", 32 + 8)])
def test_a_packed_cache_takes_what_its_format_says(storage, entry):
    config = parse(
        {
            "engine": {"kind": "vllm"},
            "prefix_cache": {"storage": storage},
            "compression": {"policy": f"full+{storage}"},
        }
    )
    model = vllm_start.read_model(config)
    assert (model.storage, model.token_bytes) == (storage, 6 * 2 * entry)
    assert config.capabilities[""].policies == (f"full+{storage}",)


@pytest.mark.parametrize(
    ("storage", "device", "avx512", "head_dim", "lacking"),
    [
        ("fp8", "cpu", True, 64, ""),
        ("fp8", "cpu", False, 64, "AVX-512 or AMX, or a GPU"),
        ("fp8", "cpu", True, 80, "heads of a multiple of 32: .* have 80"),
        ("fp8", "cuda", False, 80, ""),
        ("int4", "cpu", True, 64, "a GPU"),
        ("int4", "cuda", False, 80, ""),
        ("int4", "cuda", False, 81, "heads of a multiple of 2: .* have 81"),
        ("model", "cpu", False, 81, ""),
    ],
)
def test_a_format_is_refused_by_what_it_lacks(storage, device, avx512, head_dim, lacking, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with (
        pytest.raises(ValueError, match=rf"prefix_cache\.storage: {storage} .* needs {lacking}")
        if lacking
        else nullcontext()
    ):
        vllm_start.check_storage(storage, torch.device(device), head_dim)


def test_a_prefix_is_touched_by_a_request_of_one_token_that_nobody_is_billed_for(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch)
        due = [(KeptPrefix(b"m", b"r", (b"k",), (3, 4, 5)), salt) for salt in ("first", "fails", "last")]
        monkeypatch.setattr(here.engine.store, "to_touch", lambda usage: due.pop(0) if due else None)
        here.put("touch-0", output(7, finish="length"))
        here.put("touch-1", ValueError("no"))
        here.put("touch-2", output(7, finish="length"))
        work = asyncio.create_task(here.engine._keep_warm())
        await turns()
        assert here.sent == []
        for touched in (1, 2):
            here.engine._told.set()  # vLLM has told of blocks
            await turns()
            assert here.engine.stats().touched == touched
        assert [(request.token_ids, salt) for request, salt in here.sent] == [
            ((3, 4, 5), salt) for salt in ("first", "fails", "last")
        ]
        assert here.sent[0][0].sampling.max_tokens == 1
        assert here.engine.stats().waiting == 0
        assert not work.done()
        work.cancel()

    asyncio.run(scenario())


def test_a_prompt_that_is_warm_passes_one_that_is_not(monkeypatch):
    async def scenario() -> None:
        here = Setup(monkeypatch, step_tokens=30, max_slots=4)
        monkeypatch.setattr(here.engine.store, "lacking_tokens", lambda request: len(request.token_ids) - warm)
        warm = 0
        here.ask("cold", 40, new=8)
        here.ask("short", 20, new=8)
        warm = 32
        here.ask("warm", 40, new=8)
        await turns()
        cold, short, warm_one = here.priorities
        assert warm_one < short < cold
        assert cold == PASSES * 30  # of a step
        for name in ("cold", "short", "warm"):
            here.put(name, output(EOS, finish="stop"))
        await turns()
        assert not len(here.engine._waiting)

    asyncio.run(scenario())

"""Steps that are recorded and replayed draw what steps that are computed call by call do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.replicas import paging
from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.recording import CpuRecorder
from warmkv.replicas.engine import overlap
from warmkv.replicas.engine.graphs import MOST_RECORDED, TRIED_AGAIN, CudaRecorder, Graphs
from warmkv.replicas.protocol import GenerateRequest
from warmkv.replicas.slots import kernels, row_tables
from warmkv.replicas.slots.row_tables import RowTables, padded_batch
from warmkv.replicas.slots.step_buffer import StepBuffer

pytest.importorskip("triton", reason="triton is not installed")
SIZE = 16


@pytest.fixture
def recorder(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> CpuRecorder:
    if device.type == "cuda":
        pytest.skip("the model is on the CPU")
    monkeypatch.setattr(row_tables, "PROGRAMS", 1)  # each takes the interpreter long
    found = CpuRecorder()
    found.use(monkeypatch)
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> CpuRecorder:
    """Return a recorder where slots in pages are attended without the interpreter."""
    found = CpuRecorder()
    paging.use(monkeypatch)
    found.use_attend(monkeypatch, paging.attend)
    return found


def crowd(count: int, chance: random.Random) -> list[GenerateRequest]:
    """Return requests of the full cache that stay for a while, of which some draw at random."""
    return [
        make_request(
            prompt(chance.randrange(5, 60), seed=at),
            new=chance.randrange(2, 30),
            name=str(at),
            block=SIZE,
            seed=at,
            temperature=chance.choice([0.0, 0.0, 0.8]),
            top_k=chance.choice([0, 7]),
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("count", [24, pytest.param(300, marks=pytest.mark.soak(least=0.5))])
def test_who_joins_and_leaves_recorded_steps_draws_what_it_draws_alone(
    models: Any, quick: CpuRecorder, poisoned: None, count: int
) -> None:
    requests = crowd(count, random.Random(count))
    driver = recorded(models["llama"], quick, max_slots=6, max_queue=count, step_tokens=64)
    driver.engine.warm_up()
    graphs = driver.engine.executor.steps.graphs
    assert graphs is not None
    before, replays = len(quick.recordings), graphs.replays
    assert driver.run(*requests) == plain(models["llama"], *requests)
    assert graphs.replays - replays > count
    bounded = [key for key in graphs._recorded if key[1] is not None and key[1].bounded]  # type: ignore[index]
    assert len(quick.recordings) - before == len(bounded), "a start records all but top_p and top_k"


def test_a_start_records_batches_of_every_size_and_ends_in_time(models: Any, quick: CpuRecorder) -> None:
    sizes: dict[float, list[int]] = {}
    for seconds in (1000.0, 25.0):
        now, said = itertools.count(), list[str]()
        driver = recorded(models["llama"], quick, max_slots=11, clock=lambda now=now: float(next(now)))
        driver.engine.config = driver.engine.config.model_copy(update={"compile_seconds": seconds})
        graphs = driver.engine.executor.steps.graphs
        assert graphs is not None
        graphs.seen_before = 99  # what serves is not recorded here
        driver.engine.warm_up(said.append)
        sizes[seconds] = [int(each.split()[-2]) for each in said if each.startswith("recording")]
        padded = {key[0][0] for key in graphs._recorded}  # type: ignore[index]
        assert padded == {padded_batch(size) for size in sizes[seconds]}
    assert sizes[1000.0] == [11, 8, 4, 2, 1]
    assert sizes[25.0] == sizes[1000.0][: len(sizes[25.0])] != sizes[1000.0]


def recorded(model: Any, recorder: CpuRecorder | None, **more: Any) -> Driver:
    """Return an engine whose steps are recorded when they come the second time."""
    driver = Driver(model, prefix_cache={"block_size": SIZE}, **{"step_tokens": 256, **more})
    if recorder is not None:
        driver.engine.executor.steps.graphs = Graphs(recorder, seen_before=1)
        driver.engine.pool.is_static = True
    return driver


def plain(model: Any, *requests: GenerateRequest) -> list[list[int]]:
    """Return what an engine draws without kernels, one request after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_available", lambda device: False)
        return [Driver(model, step_tokens=256).run(each)[0] for each in requests]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what a step does not tell anew, and workspace, with what nobody wrote, before every step."""
    upload, take = StepBuffer.upload, RowTables.take

    def poisoning(buffer: StepBuffer) -> None:
        if told := buffer._written:
            upload(buffer)
            buffer._on_device[told : buffer._at["index"].start] = 1 << 40

    def taking(tables: RowTables, *given: Any) -> None:
        take(tables, *given)
        for held in tables._workspace.values():
            held.fill_(1 << 30)

    monkeypatch.setattr(StepBuffer, "upload", poisoning)
    monkeypatch.setattr(RowTables, "take", taking)


@pytest.mark.parametrize(
    "policies",
    [
        ("full", "h2o@12"),
        pytest.param(("full", "snapkv@20:window=4", "h2o@12"), marks=pytest.mark.soak(least=0.5)),
        pytest.param(
            ("rocketkv@12:window=4,kernel=3", "streaming_llm@12", "full+fp8"), marks=pytest.mark.soak(least=0.5)
        ),
        pytest.param(("tova@12", "full+turbo4", "h2o@0.8+kivi4"), marks=pytest.mark.soak(least=0.5)),
    ],
    ids=" ".join,
)
def test_a_replay_draws_what_the_calls_draw(
    models: Any, recorder: CpuRecorder, poisoned: None, policies: tuple[str, ...]
) -> None:
    """Mix all policies, greedy and at random, while requests join and leave, whatever lay in the buffers before."""
    drawing = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "seed": 4, "top_k": 9}]
    drawing = drawing[: len(policies)]
    requests = [
        make_request(prompt(18 + 9 * at, seed=at), new=6 + at, policy=policy, name=str(at), block=SIZE, **how)
        for at, (policy, how) in enumerate(zip(policies, drawing, strict=True))
    ]
    driver = recorded(models["llama"], recorder)
    assert driver.run(*requests) == plain(models["llama"], *requests)
    graphs = driver.engine.executor.steps.graphs
    assert graphs is not None
    assert recorder.recordings
    assert graphs.replays >= 1
    assert driver.engine.stats().failures == {"request": 0, "memory": 0, "device": 0}


def test_what_the_host_has_to_see_is_drawn_outside(models: Any, quick: CpuRecorder) -> None:
    """Ask for penalties, constraints and log-probabilities: the model is replayed, tokens are drawn from its logits."""
    requests = [
        make_request(prompt(18, seed=1), new=8, name="penalties", block=SIZE, repetition_penalty=1.7),
        make_request(prompt(21, seed=2), new=8, name="log-probabilities", block=SIZE, logprobs=3),
        make_request(prompt(24, seed=3), new=8, name="bias", block=SIZE, logit_bias=((5, 3.0),), temperature=0.8),
    ]
    driver = recorded(models["llama"], quick)
    assert driver.run(*requests) == plain(models["llama"], *requests)
    assert driver.engine.executor.steps.graphs is not None
    assert driver.engine.executor.steps.graphs.replays >= 2


def test_recordings_leave_their_logits_in_one_buffer_and_what_they_take_is_counted(
    models: Any, quick: CpuRecorder
) -> None:
    driver = recorded(models["llama"], quick)
    before = driver.engine.stats().step_bytes
    assert before >= driver.engine.pool.buffer.nbytes > 0
    requests = [make_request(prompt(18, seed=at), new=10 - 2 * at, name=str(at), block=SIZE) for at in range(3)]
    assert driver.run(*requests) == plain(models["llama"], *requests)
    graphs = driver.engine.executor.steps.graphs
    assert graphs is not None
    left = [logits for (logits, _), _ in graphs._recorded.values()]
    assert len({len(logits) for logits in left}) > 1
    assert len({logits.untyped_storage().data_ptr() for logits in left}) == 1
    counted = driver.engine.stats().step_bytes
    assert counted >= before + left[0].untyped_storage().nbytes()
    quick.taken = 1 << 20
    driver.engine.step()
    assert driver.engine.stats().step_bytes == counted + (1 << 20)


def test_a_recording_counts_what_it_takes_and_leaves_the_thread_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it free what the allocator holds in reserve first, as torch does, and fail when it ends."""
    free, reserve, current, fails = 100, 50, "own", False

    def empty_cache() -> None:
        nonlocal free, reserve
        free, reserve = free + reserve, 0

    @contextmanager
    def stream(other: str) -> Iterator[None]:
        nonlocal current
        before, current = current, other
        try:
            yield
        finally:
            current = before

    @contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        nonlocal free, current
        empty_cache()
        before, current = current, "capture"
        yield
        free -= 30
        if fails:
            raise RuntimeError("the capture was invalidated")
        current = before

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: 1, replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 200))
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    recorder = CudaRecorder()
    assert recorder(lambda: current)[0] == "capture"
    assert (recorder.taken, current) == (30, "own")
    fails = True
    with pytest.raises(RuntimeError):
        recorder(lambda: current)
    assert current == "own"


@pytest.mark.parametrize(("place", "error"), [("draw", ValueError), ("read", torch.OutOfMemoryError)])
def test_a_fault_behind_a_replay_repeats_nothing_that_was_replayed(
    models: Any, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch, place: str, error: type[Exception]
) -> None:
    """Let a policy evict an entry for every token; the step goes on in halves, or whole."""
    requests = [
        make_request(prompt(18 + 9 * at, seed=at), new=7, policy="h2o@12", name=str(at), block=SIZE) for at in range(2)
    ]
    driver = recorded(models["llama"], recorder)
    graphs, failed = driver.engine.executor.steps.graphs, list[int]()
    assert graphs is not None

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = original(*given)
            if graphs.replays and not failed:
                failed.append(graphs.replays)
                raise error("it fails behind a replay")
            return result

        return call

    if place == "read":
        driver.engine.overlap()
        monkeypatch.setattr(overlap, "begin_read", failing(overlap.begin_read))
    else:
        monkeypatch.setattr(driver.engine.executor, "_draw", failing(driver.engine.executor._draw))
    assert driver.run(*requests) == plain(models["llama"], *requests)
    assert failed
    assert driver.engine.stats().failures == {"request": 0, "memory": 0, "device": 0}


def test_where_nothing_can_be_recorded_steps_go_on_call_by_call(models: Any, recorder: CpuRecorder) -> None:
    """Check that nothing that was called while it failed is taken for done."""

    def failing(compute: Callable[[], Any]) -> Any:
        compute_layer, calls = kernels.attend, 0

        def attend(*given: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("operation not permitted when stream is capturing")
            given[-1].put = given[-1].counted = True  # nothing is computed while it is recorded

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "attend", attend)
            compute()
        assert kernels.attend is compute_layer

    requests = [make_request(prompt(30), new=4, policy="h2o@12", block=SIZE)]
    driver = recorded(models["llama"], recorder)
    failing.taken = 0  # type: ignore[attr-defined]
    driver.engine.executor.steps.graphs = Graphs(failing, seen_before=1)  # type: ignore[arg-type]
    assert driver.run(*requests) == plain(models["llama"], *requests)
    assert driver.engine.executor.steps.graphs.replays == 0
    assert driver.engine.stats().failures == {"request": 0, "memory": 0, "device": 0}


def test_a_recording_for_which_memory_lacks_is_tried_again() -> None:
    lacks, steps, restarted = [torch.OutOfMemoryError("CUDA out of memory")], itertools.count(), list[bool]()

    def record(compute: Callable[[], int]) -> tuple[int, Callable[[], None]]:
        if lacks:
            raise lacks.pop()
        return compute(), lambda: None

    graphs: Graphs[int] = Graphs(record, seen_before=1)  # type: ignore[arg-type]
    for _ in range(TRIED_AGAIN + 9):
        graphs.compute("key", lambda: next(steps), lambda: restarted.append(True))
    assert restarted == [True]
    assert graphs.replays == 5
    assert next(steps) == TRIED_AGAIN + 4


def test_the_recordings_used_last_are_kept() -> None:
    graphs: Graphs[int] = Graphs(lambda compute: (compute(), lambda: None), seen_before=0)
    chance, recordings = random.Random(0), list[int]()

    def compute(key: int) -> int:
        recordings.append(key)
        return key

    for key in [*range(MOST_RECORDED), *chance.choices(range(10, MOST_RECORDED), k=500), MOST_RECORDED]:
        assert graphs.compute(key, lambda key=key: compute(key), lambda: None) == key
    assert recordings == list(range(MOST_RECORDED + 1))
    assert graphs.replays == 500
    graphs.compute(MOST_RECORDED, lambda: compute(-1), lambda: None)
    graphs.compute(0, lambda: compute(0), lambda: None)  # not used for longest
    assert recordings[-1] == 0


def test_only_a_gpu_records_by_itself(models: Any) -> None:
    assert Driver(models["llama"]).engine.executor.steps.graphs is None

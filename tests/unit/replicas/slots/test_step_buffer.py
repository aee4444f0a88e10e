"""What a step is told lies where it lay, in one buffer, and reaches the device by one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.unit.replicas import paging
from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.replicas.protocol import GenerateRequest
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.row_tables import padded_batch
from warmkv.replicas.slots.step_buffer import SECTIONS, StepBuffer

SIZE = 16
GARBAGE = 1 << 40
"""No token, place or length, and no address of a page."""


@given(
    st.lists(
        st.dictionaries(st.sampled_from(SECTIONS), st.lists(st.integers(0, 99), min_size=1, max_size=40), min_size=1),
        min_size=1,
        max_size=12,
    )
)
def test_what_was_written_last_is_on_the_device(steps: list[dict[str, list[int]]]) -> None:
    buffer = StepBuffer(torch.device("cpu"))
    for step in steps:
        buffer.reserve(**{section: len(numbers) for section, numbers in step.items()})
        for section, numbers in step.items():
            buffer.write(section)[: len(numbers)] = numbers
        before = buffer.uploads
        buffer.upload()
        buffer.upload()
        assert buffer.uploads == before + 1
        for section, numbers in step.items():
            assert buffer.on_device(section)[: len(numbers)].tolist() == numbers


def test_it_moves_only_when_a_part_has_to_grow() -> None:
    buffer = StepBuffer(torch.device("cpu"))
    assert buffer.reserve(tokens=20)
    at, moves = buffer.on_device("tokens").data_ptr(), buffer.moves
    assert not buffer.reserve(tokens=32, facts=0)
    assert (buffer.on_device("tokens").data_ptr(), buffer.moves) == (at, moves)
    assert buffer.reserve(tokens=33)
    assert buffer.moves == moves + 1


def test_it_stays_as_it_is_where_memory_runs_out_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = StepBuffer(torch.device("cpu"))
    buffer.reserve(tokens=4, facts=2)
    buffer.write("facts")[:2] = 7, 8
    buffer.upload()
    zeros, moves = torch.zeros, buffer.moves

    def on_the_host_alone(*given: Any, **more: Any) -> torch.Tensor:
        if "device" in more:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*given, **more)

    monkeypatch.setattr(torch, "zeros", on_the_host_alone)
    with pytest.raises(torch.OutOfMemoryError):
        buffer.reserve(tokens=100)
    monkeypatch.undo()
    assert buffer.moves == moves
    buffer.write("tokens")[:2] = 1, 2
    buffer.upload()
    assert [buffer.on_device(name)[:2].tolist() for name in ("tokens", "facts")] == [[1, 2], [7, 8]]
    assert buffer.reserve(tokens=100)  # as soon as there is memory
    assert len(buffer.write("tokens")) == 128


def test_batches_are_padded_as_vllm_pads_them() -> None:
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    for batch in range(1, 513):
        assert padded_batch(batch) == min(size for size in sizes if size >= batch)


@pytest.fixture
def in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    paging.use(monkeypatch)


def requests(count: int) -> list[GenerateRequest]:
    """Return requests of the full cache which leave at different lengths; some draw at random."""
    return [
        make_request(
            prompt(20 + 9 * at, seed=at),
            new=4 + 5 * at,
            name=str(at),
            block=SIZE,
            seed=at,
            temperature=0.8 * (at % 2),
            top_k=5 * (at % 4),
        )
        for at in range(count)
    ]


def driver(model: Any) -> Driver:
    return Driver(model, prefix_cache={"block_size": SIZE}, step_tokens=64)


def alone(model: Any, count: int) -> list[list[int]]:
    return [driver(model).run(each)[0] for each in requests(count)]


def test_a_batch_decodes_padded_and_draws_what_each_draws_alone(in_pages: None, models: Any) -> None:
    busy, batches = driver(models["llama"]), list[tuple[int, int]]()
    forward = busy.engine.executor.forward

    def watched(ids: torch.Tensor, positions: torch.Tensor, state: Any) -> torch.Tensor:
        if ids.shape[1] == 1:
            batches.append((len(state.slots), len(ids)))
        return forward(ids, positions, state)

    busy.engine.executor.forward = watched  # type: ignore[assignment]
    assert busy.run(*requests(7)) == alone(models["llama"], 7)
    assert {count for count, _ in batches} >= {1, 2, 3, 5, 6}
    assert all(padded == padded_batch(count) for count, padded in batches)


def test_numbers_of_old_steps_are_never_read(in_pages: None, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison all of the buffer that a step does not write anew, but for facts and layout, which stay."""
    expected, poisoned = alone(models["llama"], 6), [0]
    upload = StepBuffer.upload

    def poisoning(buffer: StepBuffer) -> None:
        if buffer._written:
            poisoned[0] += 1
            told = buffer._written
            for copy in buffer._copies[1:]:
                copy.numbers[: buffer._at["index"].start] = GARBAGE
            upload(buffer)
            buffer._on_device[told : buffer._at["index"].start] = GARBAGE

    monkeypatch.setattr(StepBuffer, "upload", poisoning)
    assert driver(models["llama"]).run(*requests(6)) == expected
    assert poisoned[0] > 20


class Uploads(TorchDispatchMode):
    """Count tensors that are made of Python's numbers, each an upload by itself on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func.overloadpacket is torch.ops.aten.lift_fresh
        return func(*args, **(kwargs or {}))


def test_a_step_uploads_once_whoever_joins_or_leaves(
    in_pages: None, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncounted(*given: Any) -> None:
        with _disable_current_modes():
            paging.attend(*given)

    monkeypatch.setattr(kernels, "attend", uncounted)
    busy, steps = driver(models["llama"]), list[tuple[int, int]]()
    buffer = busy.engine.pool.buffer
    uploads, scheduler = Uploads(), busy.engine.scheduler
    busy.submit(*requests(7))
    busy.engine.step()
    while scheduler.everyone():
        before, made = buffer.uploads, uploads.made
        decodes = not scheduler.waiting and not scheduler.prefilling
        with uploads:
            busy.engine.step()
        steps.append((buffer.uploads - before, uploads.made - made if decodes else 0))
    assert set(steps) == {(1, 0)}
    assert uploads.made  # what prompts upload beside


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.soak(least=0.5))])
def test_what_a_step_reads_lies_where_it_lay_while_requests_come_and_go(
    in_pages: None, models: Any, count: int
) -> None:
    busy, chance, seen = driver(models["llama"]), np.random.default_rng(0), list[tuple[int, ...]]()
    number = 0
    busy.run(*(make_request(prompt(9), new=40, name=f"w{at}", block=SIZE) for at in range(8)))  # the most there will be

    def watched(ids: torch.Tensor, positions: torch.Tensor, state: Any) -> torch.Tensor:
        if isinstance(state, DecodeState):
            tables, (batch,) = state._tables, state.batches[0]
            held = ids, positions, tables.facts, tables.numbers, tables.taken, batch.rows
            seen.append(tuple(tensor.data_ptr() for tensor in held))
        return forward(ids, positions, state)

    forward = busy.engine.executor.forward
    busy.engine.executor.forward = watched  # type: ignore[assignment]
    while len(seen) < count:
        if len(busy.engine.scheduler.everyone()) < 8 and chance.random() < 0.3:
            number += 1
            new = int(chance.integers(2, 12))
            busy.submit(make_request(prompt(int(chance.integers(5, 60))), new=new, name=f"r{number}", block=SIZE))
        busy.engine.step()
    assert len(set(seen)) == 1

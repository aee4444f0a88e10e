"""Slots in pages: they share what the prefix cache holds, never write to it, and draw what they draw in slabs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replicas import paging
from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_preemption import Clock, crowd, of
from warmkv.policies.slot_sizes import KVShape, RowKind, slot_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import Failed, GenerateRequest
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.paged import PagedSlab, can_page, page_of
from warmkv.replicas.slots.row_tables import RowBatch, RowTables

SIZE = 16
MODELS: dict[str, LoadedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def _models(models: dict[str, LoadedModel]) -> None:
    MODELS.update(models)


@pytest.fixture
def in_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        paging.use(patch)
        yield


def driver(**more: Any) -> Driver:
    cache = {"block_size": SIZE, **more.pop("prefix_cache", {})}
    return Driver(MODELS["llama"], prefix_cache=cache, **{"step_tokens": 64, **more})


def request(name: str, length: int, *, policy: str = "full", new: int = 24, seed: int = 0) -> GenerateRequest:
    return make_request(prompt(length, seed=seed), new=new, policy=policy, name=name, block=SIZE)


@cache
def in_slabs(length: int, policy: str = "full", new: int = 24, seed: int = 0) -> list[int]:
    """Return what a request draws by itself where nothing lies in pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "supports_pages", lambda dtype, device: False)
        return driver().run(request("alone", length, policy=policy, new=new, seed=seed))[0]


def paged(engine: Any) -> PagedSlab:
    (slab,) = [slab for slab in engine.pool.slabs if isinstance(slab, PagedSlab)]
    return slab


def stored(engine: Any) -> dict[int, torch.Tensor]:
    return {id(packed.parts[0]): packed.parts[0] for packed in engine.store.places[0].blocks.values()}


def test_a_full_slot_takes_the_blocks_that_are_stored_and_pages_of_its_own_as_it_comes_to_them(in_pages: None) -> None:
    busy, shape = driver(), MODELS["llama"].kv_shape
    busy.submit(request("a", 70), request("b", 70))
    while not busy.tokens("b"):
        busy.engine.step()
    blocks, pages = stored(busy.engine), list(paged(busy.engine).pages.values())
    assert [each.shared for each in pages] == [4, 4]
    assert all({id(page) for page in each.tensors[:4]} == set(blocks) for each in pages)
    assert all(len(each.tensors) == 5 for each in pages)  # of 70 tokens the last six
    held = {id(tensor): tensor.nbytes for tensor in busy.engine.pool.tensors()} | {
        i: t.nbytes for i, t in blocks.items()
    }
    assert sum(held.values()) == 6 * SIZE * shape.token_bytes
    assert busy.engine.pool.allocated_bytes == 2 * slot_bytes(PolicySpec(), shape, 70, 24)  # what they may need
    busy.run()
    assert busy.tokens("a") == busy.tokens("b") == in_slabs(70)
    assert not busy.engine.pool.tensors()
    assert not busy.engine.pool.allocated_bytes


@pytest.mark.parametrize("policy", ["full", "snapkv@40:window=4", "snapkv@0.9:window=4"])
def test_whatever_a_policy_keeps_it_draws_the_same(in_pages: None, policy: str) -> None:
    busy = driver()
    assert busy.run(request("a", 90, policy=policy)) == [in_slabs(90, policy)]
    assert busy.run(request("b", 90, policy=policy)) == [in_slabs(90, policy)]


class Watched:
    """Notes what blocks of the prefix cache hold, and gives slots new pages full of NaN."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: Any) -> None:
        self._engine, self._blocks = engine, dict[int, tuple[torch.Tensor, torch.Tensor]]()
        allocate = PagedSlab._allocate
        patch.setattr(PagedSlab, "_allocate", lambda slab: allocate(slab).fill_(float("nan")))

    def check(self) -> None:
        """Fail if a block has changed, or if more is set aside than there is."""
        for key, block in stored(self._engine).items():
            self._blocks.setdefault(key, (block, block.clone()))
        for block, before in self._blocks.values():
            assert torch.equal(block, before)
        assert self._engine.pool.allocated_bytes <= self._engine.memory.kv.bytes


ACTIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.sampled_from([5, 16, 33, 64, 90]),
        st.sampled_from(["full", "full", "snapkv@40:window=4", "h2o@20", "full+fp8"]),
    ),
    st.tuples(st.just("step"), st.integers(1, 6), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 5), st.none()),
    st.tuples(st.just("forget"), st.none(), st.none()),
    st.tuples(st.just("memory"), st.none(), st.none()),
)


@settings(max_examples=6)
@given(st.lists(ACTIONS, min_size=4, max_size=14), st.sampled_from([3, 8, 200]))
def test_slots_come_leave_and_are_shed_while_their_prefixes_are_evicted(actions: list[Any], blocks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        paging.use(patch)
        room = blocks * SIZE * MODELS["llama"].kv_shape.token_bytes
        busy = driver(prefix_cache={"memory_bytes": room})
        watched, asked, ended = Watched(patch, busy.engine), list[tuple[int, str]](), set[str]()
        for what, first, second in actions:
            if what == "submit":
                busy.submit(request(str(len(asked)), first, policy=second))
                asked.append((first, second))
            elif what == "step":
                for _ in range(first):
                    busy.engine.step()
                    watched.check()
            elif what == "cancel":
                busy.engine.cancel(str(first))
                ended.add(str(first))
            elif what == "forget":
                busy.engine.drop_prefixes("")
            else:
                _run_out_of_memory(busy, patch)
        busy.run()
        watched.check()
        for at, (length, policy) in enumerate(asked):
            drawn, whole, failed = busy.tokens(str(at)), in_slabs(length, policy), busy.told[str(at)][-1]
            assert drawn == whole[: len(drawn)]
            assert drawn == whole or str(at) in ended or failed == Failed("OutOfMemoryError", "replica")
        assert not busy.engine.pool.tensors() or busy.engine.pool.slots == {}


def _run_out_of_memory(busy: Driver, patch: pytest.MonkeyPatch) -> None:
    """Let a step have memory for one slot in pages only, in its second layer."""

    def attend(batch: RowBatch, tables: RowTables, layer: int, *given: Any) -> None:
        if layer == 1 and len(batch.rows) > MODELS["llama"].kv_shape.kv_heads:
            raise torch.OutOfMemoryError("CUDA out of memory")
        paging.attend(batch, tables, layer, *given)

    with patch.context() as inside:
        inside.setattr(kernels, "attend", attend)
        busy.engine.step()


def test_a_page_that_cannot_be_allocated_ends_the_youngest_and_the_others_go_on(in_pages: None) -> None:
    busy = driver()
    for at in range(3):
        busy.engine._clock = lambda at=at: float(at)  # so they arrive one after the other
        busy.submit(request(str(at), 30 + at))
    busy.engine.step()
    allocate, slab = PagedSlab._allocate, paged(busy.engine)
    with pytest.MonkeyPatch.context() as patch:

        def full(slab: PagedSlab) -> torch.Tensor:
            if len(slab.pages) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return allocate(slab)

        patch.setattr(PagedSlab, "_allocate", full)
        busy.run()
    assert slab.is_empty
    assert busy.told["2"][-1] == Failed("OutOfMemoryError", "replica")
    assert [busy.tokens(str(at)) for at in range(2)] == [in_slabs(30), in_slabs(31)]


def test_a_slot_that_gets_no_pages_leaves_steps_of_others_their_table() -> None:
    shape = KVShape(1, 8, 16, 4)
    slab, full = (PagedSlab(shape, SIZE, torch.float32, torch.device("cpu")) for _ in range(2))
    slab.release(slab.take_rows(0))  # its hand-off failed
    assert slab.written(np.zeros(slab.rows, dtype=np.int64)).shape == (2, 8)
    full.table = Mock(shape=full.table.shape, new_zeros=Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        full.take_rows(0)
    assert (full.rows, full.pages) == (0, {})
    assert full.written(np.zeros(0, dtype=np.int64)).shape == (2, 0)


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_was_set_aside_resumes_in_the_blocks_that_others_keep(in_pages: None, forgotten: bool) -> None:
    """They lie on: in the prefix cache, or, where that has forgotten them, in the copy in host memory."""
    greedy = [of("greedy", seed, new=60) for seed in range(5)]
    modest = of("modest", 9, new=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "supports_pages", lambda dtype, device: False)
        expected = Driver(MODELS["llama"], max_slots=6).run(*greedy, modest)
        patch.undo()
        patch.setattr("warmkv.replicas.slots.paged.LEAST_PAGE", 8)
        busy = Driver(MODELS["llama"], clock=Clock(), max_slots=5, preempt_seconds=30.0)
        crowd(busy, greedy)
        busy.submit(modest)
        while not busy.engine.scheduler.preempted:
            busy.engine.step()
        parked = next(each for each in busy.engine.scheduler.waiting if each.swapped)
        if forgotten:
            busy.engine.drop_prefixes("greedy")
        while parked.slot is None:
            busy.engine.step()
        slab, row = next((slab, rows[0]) for slab, rows in parked.slot.places if isinstance(slab, PagedSlab))
        assert slab.pages[row].shared == (0 if forgotten else 6)  # full blocks of 50 tokens
        busy.run()
    assert [busy.tokens(each.id) for each in greedy] == expected[:5]


def test_rows_lie_in_pages_where_these_take_no_more_than_the_row_would() -> None:
    assert can_page(RowKind(capacity=64), 16)
    assert not can_page(RowKind(capacity=80), 64)  # two pages would be more
    assert [page_of(size) for size in (16, 64, 8, 48, 0)] == [16, 64, 0, 0, 0]  # of others, kernels have no tiles
    assert not can_page(RowKind(capacity=64), 0)
    assert not can_page(RowKind(capacity=64, storage="fp8"), 16)
    assert not can_page(RowKind(capacity=64, decode="ring"), 16)
    assert not can_page(RowKind(capacity=64, window=32), 16)


def test_what_attends_rows_in_pages_is_compiled_before_a_request_comes(in_pages: None) -> None:
    busy = driver()
    attended = Mock(side_effect=paging.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "attend", attended)
        busy.engine.warm_up()
    launched = [call.args[:2] for call in attended.call_args_list]
    assert any(batch.storage.plain and tables.page_size == SIZE for batch, tables in launched)
    assert not busy.engine.pool.slots


def test_where_no_kernels_attend_nothing_lies_in_pages() -> None:
    busy = driver()
    busy.run(request("a", 70))
    assert not any(isinstance(slab, PagedSlab) for slab in busy.engine.pool.slabs)

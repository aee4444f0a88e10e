"""Bytes: what a slot promises is what it takes, and no rule needs more memory than the full cache beside it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_matrix import POLICIES
from warmkv.policies import budgets
from warmkv.policies.compression import build
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape, slot_bytes, workspace_bytes
from warmkv.policy_spec import METHODS, PolicySpec
from warmkv.replicas.loading.packed_weights import packed_bytes
from warmkv.replicas.slots.rows import FREE
from warmkv.replicas.slots.slot import SlotRequest
from warmkv.replicas.slots.slots import SLAB_SLOTS, SlotPool

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=8, dtype_bytes=4)
MORE = ["rocketkv@10:window=4,kernel=3", "full", *POLICIES]


def pool() -> SlotPool:
    return SlotPool(SHAPE, torch.float32, torch.device("cpu"))


def tensor_bytes(slots: SlotPool) -> int:
    return sum(tensor.nbytes for slab in slots.slabs for tensor in slab.memory.tensors())


def fake_prompt(tokens: int) -> PrefillState:
    keys = torch.zeros(SHAPE.layers, SHAPE.kv_heads, tokens, SHAPE.head_dim)
    return PrefillState(keys, keys, q_heads=4)


def selections(counts: list[list[int]]) -> list[Selection]:
    """Return selections of so many first positions by layer and head."""
    return [
        Selection(
            torch.tensor([[*range(n)] + [-1] * (max(layer) - n) for n in layer]),
            torch.zeros(len(layer), max(layer)),
        )
        for layer in counts
    ]


@pytest.mark.parametrize("policy", MORE)
@settings(max_examples=20)
@given(tokens=st.integers(1, 300), new=st.integers(2, 200), seed=st.integers(0, 1000))
def test_allocated_bytes_are_those_of_the_tensors_and_within_what_was_promised(policy, tokens, new, seed):
    spec = budgets.in_force(PolicySpec.model_validate(policy), tokens, new)
    slot_request, slots = SlotRequest(spec, tokens, new), pool()
    promised = slot_bytes(spec, SHAPE, tokens, new)
    slot = slots.claim(slot_request, 1 << 40)
    assert slot is not None
    if budgets.follows_content(spec, tokens):  # any split of the budget over layers and heads
        kept, heads = budgets.kept_tokens(spec, tokens), SHAPE.layers * SHAPE.kv_heads
        cuts = torch.rand(heads, generator=torch.Generator().manual_seed(seed))
        parts = [max(min(6, tokens), min(tokens, int(kept * heads * float(cut / cuts.sum())))) for cut in cuts]
        counts = [parts[i : i + SHAPE.kv_heads] for i in range(0, heads, SHAPE.kv_heads)]
    else:
        counts = [[kept] * SHAPE.kv_heads for kept in budgets.layer_budgets(spec, tokens, SHAPE.layers)]
        assert slot.resident_bytes <= promised
    slots.fill(slot, fake_prompt(tokens), selections(counts))
    assert slot.resident_bytes <= promised
    rows = sum(slab.rows * len(slab.layers) for slab in slots.slabs)
    assert tensor_bytes(slots) <= slots.allocated_bytes <= tensor_bytes(slots) + rows
    slots.release(slot)
    assert slots.fit(0)
    assert not slots.slots


def test_heads_that_keep_less_take_less():
    spec = PolicySpec.model_validate("adakv@100:window=4")
    slots = pool()
    slot = slots.claim(SlotRequest(spec, 1000, 20), 1 << 40)
    assert slot is not None
    slots.fill(slot, fake_prompt(1000), selections([[20, 180], [100, 100], [4, 196]]))
    sizes = {(slab.layers[0], slab.kind.capacity): int((slab.state.owner == slot.id).sum()) for slab in slots.slabs}
    assert sizes == {(0, 48): 1, (0, 224): 1, (1, 128): 2, (2, 32): 1, (2, 224): 1}
    pyramid = slots.claim(SlotRequest(PolicySpec.model_validate("pyramidkv@100:window=4"), 1000, 20), 1 << 40)
    assert pyramid is not None
    assert [slab.kind.capacity for slab, _ in pyramid.places] == sorted(
        (slab.kind.capacity for slab, _ in pyramid.places), reverse=True
    )


@pytest.mark.parametrize(
    ("policy", "least"),
    [("full+kivi4", 5.5), ("full+kivi2", 8.0), ("full+turbo4", 7.0), ("full+turbo3", 9.0), ("full+fp8", 3.9)],
)
def test_packed_storage_is_really_smaller(policy, least):
    shape = KVShape(layers=2, kv_heads=2, head_dim=64, dtype_bytes=4)
    whole = slot_bytes(PolicySpec(), shape, 8000, 100)
    assert whole / slot_bytes(PolicySpec.model_validate(policy), shape, 8000, 100) > least


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside take at once, beside `there`."""

    def __init__(self, *there: torch.Tensor | None) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in there if tensor is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.has_budget or method.follows_content]
)
def test_no_rule_takes_more_than_the_full_cache_beside_it_at_32k_tokens(name):
    spec = PolicySpec(name=name, budget=0.1 if METHODS[name].has_budget else 1.0)
    layers, kv_heads, group, head_dim, tokens, chunk = 6, 2, 4, 32, 32_768, 64
    random = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(layers, kv_heads, tokens, head_dim, generator=random) for _ in range(2))
    full = keys.nbytes + values.nbytes
    computed = PrefillState(
        keys,
        values,
        q_heads=kv_heads * group,
        observed=budgets.observed_queries(spec, tokens),
        column_sums=budgets.needs_column_sums(spec, tokens),
        inv_freq=10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim),
    )
    query = torch.randn(1, kv_heads * group, chunk, head_dim, generator=random)
    if computed.queries is not None:
        computed.queries.copy_(torch.randn(computed.queries.shape, generator=random))
    with Peak(keys, values, query, computed.queries, computed.column_sums) as peak:
        if computed.column_sums is not None:  # the sums of a last chunk, the longest
            computed.column_sums.uniform_(generator=random)
            computed.computed = tokens - chunk
            computed.begin_chunk(chunk)
            for layer in range(layers):
                own = (x[layer, None, :, -chunk:].clone() for x in (keys, values))
                computed.attend(layer, query, *own, Softmax(head_dim**-0.5))
        build(spec).select(computed)
    assert peak.most < full


@pytest.mark.parametrize("family", ["llama", pytest.param("llama-mha", marks=pytest.mark.soak)])
def test_all_policies_in_one_batch_answer_as_they_do_alone(models, family):
    lengths = [5, 30, 61, 100]
    requests = [
        make_request(prompt(lengths[i % 4], seed=i), new=12 + i % 5, policy=policy, name=policy)
        for i, policy in enumerate([*MORE, "auto", "rocketkv@0.2:window=4"])
    ]
    alone = [Driver(models[family]).run(request)[0] for request in requests]
    busy = Driver(models[family], max_slots=7)
    assert busy.run(*requests) == alone
    assert busy.engine.pool.slots == {}
    assert all(slab.is_empty for slab in busy.engine.pool.slabs)


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    objects = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return [tensor for tensor in objects if tensor.layout == torch.strided]  # packed weights do not show their storage


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Return bytes that tensors hold, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("policy", ["full", "h2o@0.4", "adakv@0.5+kivi4:window=8", "streaming_llm@0.5"])
def test_what_the_engine_says_it_holds_is_what_tensors_hold(models, policy, request):
    others = live_tensors()  # held on to, so that no address is used anew
    before = storages(others)
    gc.freeze()  # only what is made from here on is looked through afterwards
    request.addfinalizer(gc.unfreeze)
    driver = Driver(models["llama"], step_tokens=64)
    for i in range(4):
        driver.submit(make_request(prompt(400, seed=i), new=40, policy=policy, name=str(i)))
    for _ in range(18):  # some decode, one is on its way through its prompt
        driver.engine.step()
    stats, scheduler = driver.engine.stats(), driver.engine.scheduler
    (prefilling,) = scheduler.prefilling
    assert scheduler.decoding
    buffer = storages(driver.engine.pool.buffer.tensors())
    held = sum(size for at, size in storages(live_tensors()).items() if at not in before and at not in buffer)
    reserved = sum(slot.reserved for slot in driver.engine.pool.slots.values())
    sums = prefilling.prefill is not None and prefilling.prefill.column_sums
    ahead = 0 if sums is False or sums is None else 5 * sums.nbytes  # for the copies that it is going to make
    told = stats.slot_bytes + stats.workspace_bytes + stats.store_bytes
    assert told - reserved - ahead <= held * 1.02
    assert held <= told * 1.02
    model = models["llama"].module
    plain = sum({p.data_ptr(): p.nbytes for p in [*model.parameters(), *model.buffers()]}.values())
    assert stats.weight_bytes == plain + packed_bytes(model)


def test_every_row_gets_the_keys_of_its_own_head_whatever_the_others_keep():
    shape = KVShape(layers=2, kv_heads=6, head_dim=8, dtype_bytes=4)
    slots = SlotPool(shape, torch.float32, torch.device("cpu"))
    spec = PolicySpec.model_validate("adakv@30:window=4")
    counts = [[20, 40, 20, 20, 40, 40], [30, 30, 30, 29, 30, 31]]
    keys = torch.arange(12.0).view(2, 6, 1, 1).expand(2, 6, 100, 8).contiguous()
    for _ in range(2):
        slot = slots.claim(SlotRequest(spec, 100, 8), 1 << 30)
        assert slot is not None
        slots.fill(slot, PrefillState(keys, keys, q_heads=6), selections(counts))
    for slab in slots.slabs:
        for row in np.flatnonzero(slab.state.owner != FREE):
            head, layer = int(slab.state.head[row]), slab.layers[0]
            kept = int(slab.state.count[row])
            assert kept == counts[layer][head]
            assert (slab.memory.keys[0][0, row, :kept] == 6 * layer + head).all()


def test_rows_that_moved_together_go_on_as_before(models):
    """Idle rows before, between and behind used ones are given back while others decode."""
    shape = models["llama"].kv_shape
    room = 8 * slot_bytes(PolicySpec(), shape, 30, 60) + 4096
    requests = [make_request(prompt(30, seed=i), new=60 if i in (1, 3) else 8, name=str(i)) for i in range(4)]
    alone = [Driver(models["llama"]).run(request)[0] for request in requests]
    busy = Driver(models["llama"], kv_bytes=room, prefix_cache={"enabled": False})
    busy.submit(*requests)
    for _ in range(24):
        busy.engine.step()
    before = busy.engine.pool.allocated_bytes
    busy.engine.pool.fit(0)
    assert busy.engine.pool.allocated_bytes < before
    assert busy.run(*[make_request([1], new=1, name="last")]) is not None
    assert [busy.tokens(str(i)) for i in range(4)] == alone


def test_a_large_prompt_is_admitted_though_an_idle_slab_of_its_kind_holds_the_room(models):
    shape = models["llama"].kv_shape
    spec = PolicySpec.model_validate("snapkv@16:window=4")
    needed = workspace_bytes(spec, shape, 450) + slot_bytes(spec, shape, 450, 8)
    busy = Driver(models["llama"], kv_bytes=needed + 64, prefix_cache={"enabled": False})
    busy.run(*[make_request(prompt(30, seed=i), new=8, policy=spec, name=str(i)) for i in range(3)])
    assert len(busy.run(make_request(prompt(450), new=8, policy=spec, name="large"))[0]) == 8


def test_an_allocation_that_fails_leaves_no_row_behind(monkeypatch):
    slots, slot_request = pool(), SlotRequest(PolicySpec.model_validate("pyramidkv@60:window=4"), 200, 20)
    allocate, calls = SlotPool._allocate, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return allocate(*args)

    monkeypatch.setattr(SlotPool, "_allocate", failing)
    with pytest.raises(RuntimeError):
        slots.claim(slot_request, 1 << 30)
    assert slots.fit(0)
    assert slots.claim(slot_request, 1 << 30) is not None


@pytest.mark.parametrize(
    "policy",
    [
        "pyramidkv@100+ring:sinks=64",
        "cake@0.3+ring:sinks=50,window=2",
        "adaptive@0.9+ring:sinks=100,target=0.01",
        "adaptive@0.9+ring:window=1,target=0.01,least=0.001",
    ],
)
def test_a_ring_always_has_room_behind_its_sinks(models, policy):
    driver = Driver(models["llama"])
    driver.submit(make_request(prompt(50), new=30, name="bystander"))
    assert len(driver.run(make_request(prompt(200), new=30, policy=policy))[0]) == 30
    assert len(driver.tokens("bystander")) == 30


def test_a_slot_never_lies_in_a_slab_that_was_given_back():
    """Two slabs of a kind with idle rows, room for neither as they are: what is claimed counts, and is in the pool."""
    slot_request = SlotRequest(PolicySpec.model_validate("snapkv@16:window=4"), 100, 8)
    slots = pool()
    held = [slots.claim(slot_request, 1 << 30) for _ in range(SLAB_SLOTS + 1)]  # a slab, and a second
    assert len(slots.slabs) == 2
    for slot in held[1:]:
        assert slot is not None
        slots.release(slot)
    room = slot_bytes(slot_request.spec, SHAPE, 100, 8) * 3
    fresh = slots.claim(slot_request, room)
    assert fresh is not None
    assert all(slab in slots.slabs for slab, _ in fresh.places)
    assert slots.allocated_bytes <= room


@pytest.mark.parametrize("policy", ["snapkv@16:window=4", "pyramidkv@60:window=4"])
def test_rows_of_a_kind_are_taken_or_given_back_as_room_allows(policy):
    slot_request, slots = SlotRequest(PolicySpec.model_validate(policy), 200, 20), pool()
    one = slot_bytes(slot_request.spec, SHAPE, 200, 20)
    held = [slots.claim(slot_request, 1 << 30) for _ in range(6)]
    assert None not in held
    for slot in held[:2] + held[3:]:
        slots.release(slot)  # type: ignore[arg-type]
    assert slots.claim(slot_request, one) is None  # the one that is left takes that much
    assert slots.claim(slot_request, 2 * one) is not None
    assert slots.allocated_bytes == 2 * one

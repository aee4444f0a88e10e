"""Where kernels attend: slots hold the bytes of their own rows and no others. The kernels are not called here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replicas.slots.test_memory import MORE, SHAPE, fake_prompt, selections
from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.slot_sizes import slot_bytes
from warmkv.policy_spec import STORAGES, PolicySpec
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.apart import ApartSlab
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.row_facts import FACTS, PARTS, line
from warmkv.replicas.slots.slot import Slot, SlotRequest
from warmkv.replicas.slots.slots import SlotPool

INV_FREQ = torch.ones(SHAPE.head_dim // 2, dtype=torch.float64)
ALONE = [policy for policy in MORE if "kivi" not in policy]


@pytest.fixture(scope="module", autouse=True)
def _fused() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "supports", lambda storage, dtype, device: storage.kernel is not None)
        yield


def pool() -> SlotPool:
    return SlotPool(SHAPE, torch.float32, torch.device("cpu"))


def counts_of(spec: PolicySpec, tokens: int, seed: int) -> list[list[int]]:
    """Return what each layer and head keeps; any split of the budget, where it follows from the content."""
    if not budgets.follows_content(spec, tokens):
        return [[kept] * SHAPE.kv_heads for kept in budgets.layer_budgets(spec, tokens, SHAPE.layers)]
    heads, kept = SHAPE.layers * SHAPE.kv_heads, budgets.kept_tokens(spec, tokens)
    cuts = np.random.default_rng(seed).random(heads)
    parts = [max(min(6, tokens), min(tokens, int(kept * heads * cut / cuts.sum()))) for cut in cuts]
    return [parts[i : i + SHAPE.kv_heads] for i in range(0, heads, SHAPE.kv_heads)]


def filled(slots: SlotPool, policy: str, tokens: int, new: int, seed: int = 0) -> Slot:
    spec = budgets.in_force(PolicySpec.model_validate(policy), tokens, new)
    slot = slots.claim(SlotRequest(spec, tokens, new), 1 << 40)
    assert slot is not None
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, SHAPE.layers, SHAPE.kv_heads, tokens, SHAPE.head_dim, generator=random)
    slots.fill(slot, PrefillState(keys, values, q_heads=4), selections(counts_of(spec, tokens, seed)))
    return slot


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(MORE), st.integers(1, 300), st.booleans()), min_size=1, max_size=12))
def test_a_pool_holds_what_its_slots_need_whoever_joins_and_leaves(arrivals):
    slots, there = pool(), list[Slot]()
    for seed, (policy, tokens, leaves) in enumerate(arrivals):
        there.append(filled(slots, policy, tokens, 20, seed))
        promised = slot_bytes(there[-1].slot_request.spec, SHAPE, tokens, 20)
        assert there[-1].resident_bytes <= promised
        if leaves:
            slots.release(there.pop(seed % len(there)))
        slots.give_back()
        if there:
            DecodeState(slots, there, INV_FREQ)
        assert slots.allocated_bytes >= sum(slot.resident_bytes for slot in there)
        held = sum(tensor.nbytes for tensor in slots.tensors())
        assert held <= slots.allocated_bytes <= held + sum(slab.rows for slab in slots.slabs) * SHAPE.layers
        alone = [piece for slot in there for piece in slot.pieces if not piece.kind.grouped]
        apart = sum(slab.allocated_bytes for slab in slots.slabs if isinstance(slab, ApartSlab))
        needed = sum(tensor.nbytes for piece in alone for tensor in piece.memory.tensors())
        assert needed <= apart <= needed + len(alone) * SHAPE.layers * SHAPE.kv_heads
    for slot in there:
        slots.release(slot)
    slots.give_back()
    assert slots.allocated_bytes == sum(tensor.nbytes for tensor in slots.tensors()) == 0


def test_heads_that_keep_less_take_less():
    slots = pool()
    spec = PolicySpec.model_validate("adakv@100:window=4")
    slot = slots.claim(SlotRequest(spec, 1000, 20), 1 << 40)
    assert slot is not None
    before = slots.allocated_bytes
    slots.fill(slot, fake_prompt(1000), selections([[20, 180], [100, 100], [4, 196]]))
    sizes = sorted((piece.layers[0], piece.kind.capacity, len(piece.rows)) for piece in slot.pieces)
    assert sizes == [(0, 48, 1), (0, 224, 1), (1, 128, 2), (2, 32, 1), (2, 224, 1)]
    entry = 2 * SHAPE.head_dim * SHAPE.dtype_bytes
    assert slots.allocated_bytes == slot.resident_bytes == (48 + 224 + 2 * 128 + 32 + 224) * entry < before


@settings(max_examples=15)
@given(st.sampled_from(MORE), st.sampled_from(MORE), st.integers(5, 100), st.integers(0, 99))
def test_a_slot_that_was_swapped_out_holds_what_it_held(policy, other, tokens, seed):
    slots = pool()
    first, mine = filled(slots, other, 60, 20), filled(slots, policy, tokens, 20, seed)
    DecodeState(slots, [first, mine], INV_FREQ)

    def held(slot: Slot) -> list[Any]:
        found = []
        for piece in sorted(slot.pieces, key=lambda piece: (piece.layers[0], piece.heads)):
            index = [piece.heads.index(head) for head in sorted(piece.heads)]
            at = [piece.at[i] for i in index]
            state = piece.state.chosen([piece.rows[i] for i in index])
            columns = [column.tolist() for column in state.advanced()]
            found.append((piece.heads, columns, [tensor[:, at].tolist() for tensor in piece.memory.tensors()]))
        return found

    before, size = held(mine), slots.allocated_bytes
    swapped = slots.swap_out(mine)
    slots.release(first)  # so that it comes back to other rows
    again = slots.resume(swapped, 1 << 40)
    assert again is not None
    assert held(again) == before
    slots.give_back()
    assert slots.allocated_bytes <= size
    if policy in ALONE:
        assert slots.resume(swapped, slots.allocated_bytes + again.resident_bytes - 1) is None


def test_memory_that_runs_out_leaves_no_row_behind(monkeypatch):
    from warmkv.replicas.slots import apart

    slots = pool()
    filled(slots, "snapkv@16:window=4", 100, 20)
    before = slots.allocated_bytes
    allocate, calls = apart.RowMemory.allocate, list[Any]()

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return allocate(*given)

    monkeypatch.setattr(apart.RowMemory, "allocate", failing)
    spec = PolicySpec.model_validate("pyramidkv@60:window=4")
    slot = slots.claim(SlotRequest(spec, 200, 20), 1 << 40)
    assert slot is not None
    with pytest.raises(RuntimeError):
        slots.fill(slot, fake_prompt(200), selections(counts_of(spec, 200, 0)))
    slots.release(slot)
    assert slots.allocated_bytes == before
    assert len(slots.slots) == 1


@settings(max_examples=20)
@given(st.lists(st.sampled_from(ALONE), min_size=1, max_size=5), st.integers(0, 99))
def test_kernels_are_told_where_each_row_of_each_layer_lies(policies, seed):
    """Against a walk through all pieces."""
    slots = pool()
    there = [filled(slots, policy, 40 + 30 * at, 20, seed) for at, policy in enumerate(policies)]
    state = DecodeState(slots, there, INV_FREQ)
    state.begin()
    tables = slots.tables(INV_FREQ)
    found: dict[tuple[int, int], tuple[str, int, int]] = {}
    for layer, batches in enumerate(state.batches):
        for batch in batches:
            for row, place in zip(batch.rows.tolist(), batch.places.tolist(), strict=True):
                if row < 0:
                    continue
                facts = tables.facts[:, row].tolist()
                further = (layer - facts[line("first_layer")]) * facts[len(PARTS)]
                found[layer, place] = (batch.storage.name, facts[0] + further, facts[line("capacity")])
    wanted = {}
    for number, slot in enumerate(there):
        for piece in slot.pieces:
            for at, head in zip(piece.at, piece.heads, strict=True):
                for layer in piece.layers:
                    address = piece.memory.keys[0][layer - piece.layers[0], at].data_ptr()
                    place = number * SHAPE.kv_heads + head
                    wanted[layer, place] = (piece.kind.storage, address, piece.kind.packed)
    assert found == wanted
    assert len(FACTS) + 2 * len(PARTS) == len(tables.facts)
    assert {name for name, _, _ in found.values()} <= set(STORAGES)

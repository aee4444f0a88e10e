"""Rows in pages through the kernels, in Triton's interpreter: beside rows of slabs they attend as in slabs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots import kernels, row_tables
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.paged import PagedSlab
from warmkv.replicas.slots.slot import SlotRequest
from warmkv.replicas.slots.slots import SlotPool

pytest.importorskip("triton", reason="triton is not installed")
SIZE = 16
SHAPE = KVShape(layers=2, kv_heads=2, head_dim=12, dtype_bytes=4)
INV_FREQ = torch.ones(SHAPE.head_dim // 2, dtype=torch.float64)


def attended(
    specs: list[PolicySpec], steps: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, SlotPool]:
    """Return what slots attend to in some steps, and their pool; keys, values and queries are always the same."""
    torch.manual_seed(0)
    pool, slots, outputs = SlotPool(SHAPE, dtype, device, page_size), [], []
    size, group = (SHAPE.layers, SHAPE.kv_heads), 3
    for at, spec in enumerate(specs):
        tokens = 30 + 17 * at
        slot = pool.claim(SlotRequest(spec, tokens, 20), 1 << 40)
        assert slot is not None
        keys, values = torch.randn(2, *size, tokens, SHAPE.head_dim).to(device, dtype)
        prompt = PrefillState(keys, values, q_heads=SHAPE.kv_heads * group)
        kept = budgets.layer_budgets(spec, tokens, SHAPE.layers)
        heads = SHAPE.kv_heads
        chosen = [
            Selection(torch.arange(n, device=device).repeat(heads, 1), torch.rand(heads, n).to(device)) for n in kept
        ]
        blocks = [torch.stack([keys[:, :, i : i + SIZE], values[:, :, i : i + SIZE]]) for i in (0, SIZE)]
        pool.fill(slot, prompt, chosen, blocks[: tokens // SIZE])
        slots.append(slot)
    for _ in range(steps):
        state = DecodeState(pool, slots, INV_FREQ.to(device))
        for layer in range(SHAPE.layers):
            q = torch.randn(len(slots), SHAPE.kv_heads * group, 1, SHAPE.head_dim).to(device, dtype)
            k, v = torch.randn(2, len(slots), SHAPE.kv_heads, 1, SHAPE.head_dim).to(device, dtype)
            outputs.append(state.attend(layer, q, k, v, Softmax(SHAPE.head_dim**-0.5)).float())
    return torch.stack(outputs), pool


@pytest.mark.parametrize(
    ("policies", "dtype"),
    [
        (("full", "full"), torch.bfloat16),
        (("full", "h2o@20", "rocketkv@20:window=4"), torch.float32),
    ],
)
def test_kernels_attend_rows_in_pages_beside_others_as_in_slabs(
    device: torch.device, dtype: torch.dtype, policies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = PagedSlab._allocate
    monkeypatch.setattr(PagedSlab, "_allocate", lambda slab: allocate(slab).fill_(float("nan")))  # what is not in use
    monkeypatch.setattr(row_tables, "SPLIT_ENTRIES", SIZE)
    specs = [
        budgets.in_force(PolicySpec.model_validate(policy), 30 + 17 * at, 20) for at, policy in enumerate(policies)
    ]
    got, pool = attended(specs, 3, SIZE, dtype, device)
    assert [slot.paged for slot in pool.slots.values()] == [policy == "full" for policy in policies]
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "is_available", lambda device: False)
        wanted, _ = attended(specs, 3, SIZE, dtype, device)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_slots_in_pages_draw_through_the_kernels_as_in_slabs(device: torch.device, models: Any) -> None:
    if device.type == "cuda":
        pytest.skip("the model is on the CPU")
    first, second = (make_request(prompt(20), new=2, name=name, block=SIZE) for name in "ab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_available", lambda device: False)
        expected = Driver(models["llama"], step_tokens=64).run(make_request(prompt(20), new=2))
    busy = Driver(models["llama"], step_tokens=64, prefix_cache={"block_size": SIZE})
    assert busy.run(first) == busy.run(second) == expected
    assert busy.started("b").cached_tokens == 16
    assert any(isinstance(slab, PagedSlab) for slab in busy.engine.pool.slabs)

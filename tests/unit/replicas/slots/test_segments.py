"""RocketKV's second stage against explicit loops: which segments a step reads, and what attention makes of them."""

from __future__ import annotations

import pytest
import torch

from tests.unit.replicas.slow_methods.rocketkv import attend
from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slot import SlotRequest
from warmkv.replicas.slots.slots import SlotPool

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=8, dtype_bytes=4)
GROUP, SCALE = 3, 8**-0.5


@pytest.mark.parametrize(
    (
        "budget",
        "segment",
        "channels",
    ),  # kept 18, 28, 36, 54: segment ceil(sqrt(kept / budget)), channels 8 segment budget // kept
    [(4, 3, 5), (8, 2, 4), (13, 2, 5), (40, 1, 5)],
)
@pytest.mark.parametrize("others", [0, 2])
def test_a_step_reads_the_entries_that_promise_most(budget, segment, channels, others):
    random = torch.Generator().manual_seed(budget)
    tokens, new = 60, 25
    spec = PolicySpec(name="rocketkv", budget=budget, window=3)
    kept = budgets.kept_tokens(spec, tokens)
    assert kept > budget
    pool = SlotPool(SHAPE, torch.float32, torch.device("cpu"))
    slots, caches = [], []
    for i in range(1 + others):  # slots of other budgets beside it, whose segments differ in size and number
        mine = SlotRequest(spec if not i else PolicySpec(name="rocketkv", budget=budget + 3 * i, window=3), tokens, new)
        slot = pool.claim(mine, 1 << 30)
        assert slot is not None
        keys, values = (
            torch.randn(SHAPE.layers, SHAPE.kv_heads, tokens, SHAPE.head_dim, generator=random) for _ in range(2)
        )
        left = budgets.kept_tokens(mine.spec, tokens)
        positions = torch.stack([torch.randperm(tokens, generator=random)[:left].sort().values for _ in range(2)])
        pool.fill(slot, PrefillState(keys, values, q_heads=2 * GROUP), [Selection(positions)] * SHAPE.layers)
        slots.append(slot)
        if not i:
            caches = [
                [([*keys[at, h, positions[h]]], [*values[at, h, positions[h]]]) for h in range(SHAPE.kv_heads)]
                for at in range(SHAPE.layers)
            ]
    for _ in range(new - 1):
        state = DecodeState(pool, slots, torch.zeros(4, dtype=torch.float64))
        for layer in range(SHAPE.layers):
            batch = len(slots)
            query = torch.randn(batch, 2 * GROUP, 1, SHAPE.head_dim, generator=random)
            key, value = (torch.randn(batch, SHAPE.kv_heads, 1, SHAPE.head_dim, generator=random) for _ in range(2))
            out = state.attend(layer, query, key, value, Softmax(SCALE))
            for head, (keys, values) in enumerate(caches[layer]):
                keys.append(key[0, head, 0])
                values.append(value[0, head, 0])
                group = slice(head * GROUP, (head + 1) * GROUP)
                expected = attend(query[0, group, 0], keys, values, segment, budget // 2, channels)
                torch.testing.assert_close(out[0, group, 0], expected)

"""Kernels in a batch that is padded: sequences that are none attend nothing, and nothing comes of what they hold."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.replicas.slots.test_launches import filled
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots import row_tables
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slots import SlotPool

pytest.importorskip("triton", reason="triton is not installed")
SHAPE = KVShape(layers=3, kv_heads=2, head_dim=16, dtype_bytes=4, q_heads=4)
INV_FREQ = torch.ones(SHAPE.head_dim // 2, dtype=torch.float64)


@pytest.mark.parametrize("entries", [16, 1 << 20], ids=["split", "whole"])
@pytest.mark.parametrize("policies", [("full", "full", "full"), ("h2o@20", "full+fp8", "full")], ids=" ".join)
def test_what_pads_a_batch_changes_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, policies: tuple[str, ...], entries: int
) -> None:
    monkeypatch.setattr(row_tables, "SPLIT_ENTRIES", entries)
    outputs = []
    for padded in (False, True):
        torch.manual_seed(0)
        pool = SlotPool(SHAPE, torch.float32, device, page_size=16)
        slots = [filled(pool, PolicySpec.model_validate(policy), 30 + 7 * at, 6) for at, policy in enumerate(policies)]
        for _ in range(2):
            state = DecodeState(pool, slots, INV_FREQ.to(device))
            assert state.padded == 4
            q, k, v = (torch.randn(3, heads, 1, SHAPE.head_dim, device=device) for heads in (4, 2, 2))
            for layer in range(SHAPE.layers):
                given = q, k, v
                if padded:
                    given = tuple(torch.cat([part, torch.full_like(part[:1], math.nan)]) for part in given)
                out = state.attend(layer, *given, Softmax(0.25))
                assert out.shape == given[0].shape
                assert not out[3:].any()
                outputs.append(out[:3])
    half = len(outputs) // 2
    assert all(torch.equal(*pair) for pair in zip(outputs[:half], outputs[half:], strict=True))
    assert all(out.isfinite().all() and out.any() for out in outputs)

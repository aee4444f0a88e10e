"""Attention of a chunk behind a long prefix, against every query's softmax by hand."""

from __future__ import annotations

import pytest
import torch

from warmkv.policies.compression import prefill_state
from warmkv.policies.compression.prefill_state import LEAST_BEFORE, PrefillState
from warmkv.policies.compression.softmax import Softmax

DIM, HEADS, KV_HEADS = 8, 6, 2


def by_hand(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Attend q [q_heads, n, d] at start.. to keys and values [kv_heads, m, d] in float64."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 0) for x in (keys, values))
    logits = query.double() @ keys.transpose(1, 2) * DIM**-0.5
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(start + 1)
    return logits.masked_fill(hidden, float("-inf")).softmax(-1) @ values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "count"), [(LEAST_BEFORE, 70), (LEAST_BEFORE + 3, 2), (9, 70), (LEAST_BEFORE, 1)])
def test_a_chunk_behind_a_prefix_attends_to_all_of_it_without_a_mask(start, count, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(start + count)
    keys, values = (torch.randn(1, KV_HEADS, start + count, DIM, generator=generator).to(dtype) for _ in range(2))
    query = (3 * torch.randn(1, count, HEADS, DIM, generator=generator)).to(dtype).transpose(1, 2)  # as models give it
    masks: list[int] = []
    causal = prefill_state.causal
    monkeypatch.setattr(prefill_state, "causal", lambda *given: masks.append(1) or causal(*given))
    prompt = PrefillState(keys.clone(), values.clone(), q_heads=HEADS)
    prompt.reuse(start)
    prompt.begin_chunk(count)
    own = keys[0, None, :, start:], values[0, None, :, start:]
    out = prompt.attend(0, query, *own, Softmax(DIM**-0.5))
    drawn = prompt.attend_drawn(0, query, *own, Softmax(DIM**-0.5))
    expected = by_hand(query[0], keys[0], values[0], start)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out[0].double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(drawn[0].double(), expected[:, -1:], rtol=tolerance, atol=tolerance)
    assert bool(masks) == (start < LEAST_BEFORE)

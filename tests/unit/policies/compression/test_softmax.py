"""Prefill attention under capped logits and learned sinks: a few queries at a time, at a bounded cost for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warmkv.policies.compression import softmax
from warmkv.policies.compression.softmax import Softmax, attend


class Conversions(TorchDispatchMode):
    """Count conversions to another type."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", [Softmax(softcap=5.0), Softmax(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))])
def test_keys_and_values_are_converted_once_however_many_pieces_the_queries_go_in(rule, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(heads, 24, 8, generator=generator).bfloat16() for heads in (4, 2, 2))
    whole = attend(query, keys, values, 0, 0, rule)
    monkeypatch.setattr(softmax, "LOGITS_AT_ONCE", 4 * 24 * 3)  # eight pieces
    with Conversions() as seen:
        in_pieces = attend(query, keys, values, 0, 0, rule)
    torch.testing.assert_close(in_pieces, whole)
    assert seen.count <= 3 + 8  # query, keys and values; the output of every piece

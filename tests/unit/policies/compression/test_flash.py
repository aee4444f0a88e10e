"""Attention of chunks by flash kernels, torch's and FlashAttention 4's, which run on GPUs only.

Here obvious ones of the same contracts stand in for them, and tensors without data tell what is called and allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warmkv.policies.compression import flash
from warmkv.policies.compression.prefill_state import ROWS_ON_CPU, PrefillState
from warmkv.policies.compression.softmax import Softmax

DIM, HEADS, KV_HEADS, LAYERS = 8, 6, 2, 2


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **rest: Any,
) -> tuple[Tensor, ...]:
    """Attend q [1, n, q_heads, d] to k, v [1, m, kv_heads, d], of which query i is aligned with key m - n + i.

    It sees keys from `window_size_left` before that one on to `window_size_right` behind it, and if causal to itself.
    """
    assert query.shape[1] == max_q
    assert key.shape[1] == max_k
    assert dropout_p == 0
    assert not any(rest.values())
    out = obvious(query, key, value, scale, is_causal, (window_size_left, window_size_right))
    return out, *(query.new_empty(0) for _ in range(4))


def flash_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    learnable_sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Stand in for `flash_attn.cute.flash_attn_func`, by whose contract a softcap of 0 is none."""
    out = obvious(query, key, value, softmax_scale, causal, window_size, softcap or None, learnable_sink)
    return out, query.new_empty(0)


def obvious(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    window: tuple[int | None, int | None],
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend one query after the other; q [1, n, q_heads, d], k, v [1, m, kv_heads, d] as of `stand_in`."""
    out, ahead = torch.empty_like(query), key.shape[1] - query.shape[1]
    for head in range(query.shape[2]):
        keys, values = (each[0, :, head // (query.shape[2] // key.shape[2])] for each in (key, value))
        for i in range(query.shape[1]):
            own = ahead + i
            first = 0 if window[0] is None else max(0, own - window[0])
            last = key.shape[1] if window[1] is None else min(key.shape[1], own + window[1] + 1)
            last = min(last, own + 1) if is_causal else last
            logits = keys[first:last] @ query[0, i, head] * scale
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            powers = logits.exp()
            total = powers.sum() if sinks is None else powers.sum() + sinks[head].exp()
            out[0, i, head] = (powers / total) @ values[first:last]
    return out


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """Let the kernel's operator run on a CPU, by the one that stands in for it."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", stand_in, "CPU")
    yield
    library._destroy()


def state(tokens: int, window: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PrefillState:
    keys = torch.zeros(LAYERS, KV_HEADS, tokens, DIM, dtype=dtype, device=device)
    return PrefillState(keys, keys.clone(), q_heads=HEADS, windows=(0, window) if window else ())


PLAIN = Softmax(DIM**-0.5)


def attend(prompt: PrefillState, tensors: list[Tensor], start: int, stop: int, softmax: Softmax = PLAIN) -> Tensor:
    """Compute positions start..stop of all layers; q, k and v [1, n, heads, d] are transposed as models do."""
    prompt.begin_chunk(stop - start)
    q, k, v = (each[:, start:stop].transpose(1, 2) for each in tensors)
    out = [prompt.attend(0, q, k, v, softmax), prompt.attend_drawn(1, q, k, v, softmax)]
    out.append(prompt.attend(1, q, k, v, softmax))
    prompt.end_chunk()
    return torch.cat(out, dim=2)


@given(
    tokens=st.integers(2, 12),
    cuts=st.sets(st.integers(1, 11), max_size=4),
    window=st.sampled_from([0, 1, 3, 20]),
)
def test_a_prompt_cut_anywhere_is_attended_to_as_without_the_kernel(
    on_cpu: None, tokens: int, cuts: set[int], window: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    tensors = [torch.randn(1, tokens, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    places = [0, *sorted(cut for cut in cuts if cut < tokens), tokens]
    prompt, plain = state(tokens, window), state(tokens, window)
    for start, stop in pairwise(places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flash, "takes", lambda *given: True)
            got = attend(prompt, tensors, start, stop)
        torch.testing.assert_close(got, attend(plain, tensors, start, stop), rtol=1e-5, atol=1e-6)


@given(
    tokens=st.integers(2, 12),
    cuts=st.sets(st.integers(1, 11), max_size=4),
    window=st.sampled_from([0, 1, 3, 20]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    tile=st.sampled_from([0, 4]),
)
def test_flash_attention_4_attends_with_capped_logits_and_sinks_too(
    tokens: int, cuts: set[int], window: int, softcap: float | None, sinks: bool, tile: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    tensors = [torch.randn(1, tokens, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    softmax = Softmax(DIM**-0.5, softcap, torch.randn(HEADS, generator=generator) if sinks else None)
    places = [0, *sorted(cut for cut in cuts if cut < tokens), tokens]
    prompt, plain = state(tokens, window), state(tokens, window)
    prompt._query_tile = tile
    for start, stop in pairwise(places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flash, "takes", lambda *given: True)
            patch.setattr(flash, "_flash_attention_4", lambda kind: flash_attn_func)
            patch.setattr(flash, "LEAST_WORK", 0)
            got = attend(prompt, tensors, start, stop, softmax)
        torch.testing.assert_close(got, attend(plain, tensors, start, stop, softmax), rtol=1e-5, atol=1e-6)


class Recorder(TorchDispatchMode):
    """Take down the operators that run, and the elements of the largest tensor that each makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        is_view = operator.is_view or operator._schema.is_mutable
        tensors = [each for each in (made if isinstance(made, tuple | list) else [made]) if isinstance(each, Tensor)]
        largest = 0 if is_view else max((prod(each.shape) for each in tensors), default=0)
        self.calls.append((operator.name(), largest))
        return made


def meets_the_kernels_conditions(params: Any) -> bool:
    """Stand in for torch's check, which says no in a build without CUDA: what `sdp_utils.cpp` asks of flash attention.

    16 bits, no mask, four dimensions of which the last is contiguous, heads of a multiple of the KV heads, at most 256
    channels; and `is_causal` only for as many queries as keys.
    """
    q, k, v = params.query, params.key, params.value
    square = q.shape[2] == k.shape[2]
    return (
        all(each.dim() == 4 and each.stride(-1) == 1 and each.dtype == torch.bfloat16 for each in (q, k, v))
        and params.attn_mask is None
        and params.dropout == 0
        and params.enable_gqa
        and q.shape[1] % k.shape[1] == 0
        and q.shape[-1] == k.shape[-1] <= 256
        and (square or not params.is_causal)
    )


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("start", [0, 16, 1000])
def test_nothing_of_queries_by_keys_is_allocated(start: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "can_use_flash_attention", meets_the_kernels_conditions)
    count = 400
    with Recorder() as recorder:
        prompt = state(start + count, window, dtype=torch.bfloat16, device="meta")
        prompt.reuse(start)
        heads = (HEADS, KV_HEADS, KV_HEADS)
        given = [torch.empty(1, start + count, n, DIM, dtype=torch.bfloat16, device="meta") for n in heads]
        recorder.calls.clear()
        attend(prompt, given, start, start + count)
    names = [name for name, _ in recorder.calls]
    assert names.count("aten::_flash_attention_forward") == 3
    assert not any("scaled_dot_product" in name or "mask" in name for name in names)
    assert max(largest for name, largest in recorder.calls if name != "aten::cat") <= HEADS * count * DIM


def test_without_the_kernel_a_mask_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the test above can fail."""
    monkeypatch.setattr(flash, "can_use_flash_attention", lambda params: False)
    with Recorder() as recorder:
        prompt = state(1400, 0, dtype=torch.bfloat16, device="meta")
        prompt.reuse(1000)
        given = [torch.empty(1, 1400, n, DIM, dtype=torch.bfloat16, device="meta") for n in (HEADS, KV_HEADS, KV_HEADS)]
        recorder.calls.clear()
        attend(prompt, given, 1000, 1400)
    assert max(largest for name, largest in recorder.calls if name != "aten::cat") >= ROWS_ON_CPU * 1400


@pytest.mark.parametrize("dim", [12, 64])
def test_channels_that_the_kernel_would_pad_are_left_to_torch(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "can_use_flash_attention", lambda params: True)
    q = torch.empty(1, HEADS, 3, dim, dtype=torch.bfloat16, device="meta")
    assert flash.takes(q, q[:, :KV_HEADS], q[:, :KV_HEADS], PLAIN) == (dim == 64)
    assert not flash.takes(q, q[:, :KV_HEADS], q[:, :KV_HEADS], Softmax(DIM**-0.5, softcap=1.5))
    q = torch.empty(1, HEADS, 3, dim, dtype=torch.bfloat16)
    assert not flash.takes(q, q[:, :KV_HEADS], q[:, :KV_HEADS], PLAIN)


def test_torch_attends_few_queries_to_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_flash_attention_4", lambda kind: flash_attn_func)
    keys = torch.empty(1, 8, 8192, 64, device="meta")
    few, many = (torch.empty(1, 32, count, 64, device="meta") for count in (256, 768))
    capped = Softmax(DIM**-0.5, softcap=1.5)
    assert [flash._chosen(query, keys, PLAIN) for query in (few, many)] == [None, flash_attn_func]
    assert [flash._chosen(query, keys, capped) for query in (few, many)] == [flash_attn_func, flash_attn_func]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kinds be asked for as on an H100, on which a tensor for trial lies anywhere."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **rest: torch.empty(*shape, **rest))
    flash._flash_attention_4.cache_clear()
    yield
    flash._flash_attention_4.cache_clear()


def kind(**different: Any) -> flash._Kind:
    given = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "q_heads": HEADS, "kv_heads": KV_HEADS}
    given |= {"head_dim": DIM, "is_windowed": False, "softcap": None, "sinks": None}
    return flash._Kind(**{**given, **different})


def test_flash_attention_4_is_tried_once_for_every_kind_of_layer(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, lengths = [], []

    def counting(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        tried.append(options)
        lengths.append(tensors[0].shape[1])
        return flash_attn_func(*tensors, **{"softmax_scale": 1.0, **options})

    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=counting))
    kinds = [kind(), kind(is_windowed=True), kind(softcap=1.5), kind(sinks=torch.bfloat16)]
    assert [flash._flash_attention_4(each) for each in (*kinds, *kinds)] == 8 * [counting]
    assert [each["window_size"] for each in tried] == 2 * [(None, None)] + 2 * [(0, 0)] + 4 * [(None, None)]
    assert [each["softcap"] for each in tried] == [0.0] * 4 + [1.5] * 2 + [0.0] * 2
    assert all(each["learnable_sink"].shape == (HEADS,) for each in tried[6:])
    assert lengths == 4 * list(flash.TRIED)
    assert flash._flash_attention_4(kind(dtype=torch.float32)) is None


def test_where_the_flash_attention_4_fails_torch_attends(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("no such head dimension")

    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=refuses))
    assert flash._flash_attention_4(kind()) is None
    assert "no such head dimension" in caplog.text
    flash._flash_attention_4.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # as if it were not installed
    caplog.clear()
    assert flash._flash_attention_4(kind()) is None
    assert not caplog.text


def test_before_hopper_the_flash_attention_4_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    flash._flash_attention_4.cache_clear()
    assert flash._flash_attention_4(kind()) is None
    flash._flash_attention_4.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("by", ["torch", "flash_attn_func", "flash_attn_func, capped", "flash_attn_func, sinks"])
@pytest.mark.parametrize("window", [0, 1, 100])
@pytest.mark.parametrize(("start", "count"), [(0, 300), (77, 300), (1000, 1), (1000, 130)])
def test_the_kernel_itself_attends_as_float32_does(
    start: int, count: int, window: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "torch":
        monkeypatch.setattr(flash, "_flash_attention_4", lambda kind: None)
    else:
        pytest.importorskip("flash_attn.cute", reason="FlashAttention 4 is not installed")
        monkeypatch.setattr(flash, "LEAST_WORK", 0)
    generator = torch.Generator().manual_seed(start + count)
    dim, heads = 64, (HEADS, KV_HEADS, KV_HEADS)
    tensors = [torch.randn(1, n, start + count, dim, generator=generator).to("cuda", torch.bfloat16) for n in heads]
    query, keys, values = tensors[0][:, :, start:], *tensors[1:]
    sinks = torch.randn(HEADS, generator=generator).to("cuda", torch.bfloat16) if "sinks" in by else None
    softmax = Softmax(dim**-0.5, 1.5 if "capped" in by else None, sinks, window)
    assert flash.takes(query, keys, values, softmax)
    got = flash.attend(query, keys, values, softmax)
    rows = (each.float().cpu().transpose(1, 2) for each in (query, keys, values))
    left = (window - 1, 0) if window else (None, None)
    sinks = None if sinks is None else sinks.float().cpu()
    expected = obvious(*rows, softmax.scale, True, left, softmax.softcap, sinks).transpose(1, 2)
    torch.testing.assert_close(got.float().cpu(), expected, rtol=2e-2, atol=2e-2)

"""The kernels in C++ against attention in float64, written out."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.policies.compression import cpu_attention
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.softmax import Softmax

has_kernels = shutil.which("g++") is not None and "AVX512" in torch.backends.cpu.get_cpu_capability()
needs_kernel = pytest.mark.skipif(not has_kernels, reason="needs g++ and a CPU with AVX-512")


@pytest.fixture
def kernel(monkeypatch):
    """Load the kernels for a test; others go on with torch's."""
    monkeypatch.setattr(cpu_attention, "_kernels", None)
    assert cpu_attention.load()


def written_out(query, keys, values, scale, window):
    query, keys, values = query[0].double(), keys[0].double(), values[0].double()
    n, m, group = query.shape[1], keys.shape[1], len(query) // len(keys)
    out = torch.empty_like(query)
    for head, row in [(head, row) for head in range(len(query)) for row in range(n)]:
        last = m - n + row
        seen = range(max(0, last + 1 - window) if window else 0, last + 1)
        weights = torch.softmax(keys[head // group, seen.start : seen.stop] @ query[head, row] * scale, dim=0)
        out[head, row] = weights @ values[head // group, seen.start : seen.stop]
    return out[None]


@needs_kernel
@pytest.mark.usefixtures("kernel")
@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3), st.integers(1, 7), st.integers(16, 70), st.sampled_from([0, 1, 100, 128, 250, 600]),
    st.sampled_from([8, 32, 80, 96, 128]), st.sampled_from([0, 0, 1, 40, 300]), st.sampled_from([1.0, 30.0]),
    st.integers(1, 2), st.integers(0, 2**16),
)  # fmt: skip
def test_it_is_attention(kv_heads, group, n, prefix, dim, window, large, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    m = prefix + n
    longer = torch.randn(2, kv_heads, m + 5, dim, generator=generator)  # a view of a buffer for more
    keys, values = longer[0, None, :, :m] * large, longer[1, None, :, 3 : m + 3]
    query = torch.randn(1, n, kv_heads * group, dim, generator=generator).transpose(1, 2)
    assert cpu_attention.takes(query, keys, values) == (n >= (16 if prefix else 48))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = cpu_attention.attend(query, keys, values, dim**-0.5, window)
    finally:
        torch.set_num_threads(before)
    expected = written_out(query, keys, values, dim**-0.5, window)
    torch.testing.assert_close(found.double(), expected, atol=3e-6 * large, rtol=0)  # large logits round as much


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [0, 300])
def test_heads_whose_keys_are_too_many_to_be_transposed_at_once(window):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 17, 128, generator=generator)
    keys, values = torch.randn(2, 1, 3, 4600, 128, generator=generator)
    found = cpu_attention.attend(query, keys, values, 0.1, window)
    torch.testing.assert_close(found.double(), written_out(query, keys, values, 0.1, window), atol=3e-6, rtol=0)


@needs_kernel
@pytest.mark.usefixtures("kernel")
def test_a_prompt_in_chunks_makes_no_mask_and_is_attended_as_by_torch(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 700, 32, generator=generator) for heads in (6, 2, 2))

    def attended():
        state = PrefillState(torch.zeros(1, 2, 700, 32), torch.zeros(1, 2, 700, 32), q_heads=6)
        parts = []
        for begin, end in ((0, 100), (100, 612), (612, 620), (620, 700)):  # eight are too few for the kernel
            state.begin_chunk(end - begin)
            chunk = (each[:, :, begin:end] for each in (query, key, value))
            parts.append(state.attend(0, *chunk, Softmax(32**-0.5)))
            masks.append([mask for mask in state._masks.values() if mask is not None])
            state.end_chunk()
        return torch.cat(parts, dim=2)

    masks = []
    found = attended()
    assert [bool(made) for made in masks] == [False, False, False, False]
    monkeypatch.setattr(cpu_attention, "_kernels", None)
    torch.testing.assert_close(found, attended(), atol=3e-6, rtol=0)
    assert any(masks)  # so torch's kernel was asked this time


@needs_kernel
@pytest.mark.usefixtures("kernel")
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([1, 2, 15, 16, 17, 127, 128, 129, 300]), min_size=1, max_size=5), st.integers(1, 9),
    st.sampled_from([16, 32, 80, 128]), st.sampled_from([1.0, 30.0]), st.integers(1, 2), st.integers(0, 2**16),
)  # fmt: skip
def test_rows_take_a_token_and_attend_to_what_they_have(lengths, group, dim, large, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    slab = torch.randn(2, 3, rows + 1, 304, dim, generator=generator)  # of several layers and more rows
    slab[0] *= large
    keys, values = slab[0, 1, :rows], slab[1, 2, :rows, 1:]
    for row, length in enumerate(lengths):
        keys[row, length:] = values[row, length:] = float("nan")  # nobody reads it
    entries = torch.tensor([seed % length for length in lengths])
    places = torch.randperm(rows + 2, generator=generator)[:rows]  # in a batch that has others
    key, value = torch.randn(2, dim, rows + 2, generator=generator).transpose(1, 2).contiguous()
    expected_slab = slab.clone()
    expected_slab[0, 1, range(rows), entries] = key[places]
    expected_slab[1, 2, range(rows), entries + 1] = value[places]
    query = torch.randn(group, rows + 2, dim, generator=generator).transpose(0, 1)
    of_keys, of_values = (torch.tensor([row.data_ptr() for row in each]) for each in (keys, values))
    found = torch.full((rows + 2, group, dim), -7.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cpu_attention.attend_rows(
            query, key, value, of_keys, of_values, entries, torch.tensor(lengths), places, dim**-0.5, found
        )
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(slab, expected_slab, rtol=0, atol=0, equal_nan=True)
    for row, (place, length) in enumerate(zip(places.tolist(), lengths, strict=True)):
        weights = torch.softmax(query[place].double() @ keys[row, :length].double().T * dim**-0.5, dim=1)
        expected = weights @ values[row, :length].double()
        torch.testing.assert_close(found[place].double(), expected, atol=3e-6 * large, rtol=0)
    others = sorted({*range(rows + 2)} - {*places.tolist()})
    assert (found[others] == -7.0).all()


def test_they_are_not_used_before_they_are_loaded():
    query = torch.zeros(1, 2, 48, 16)
    assert not cpu_attention.takes(query, query, query)
    assert not cpu_attention.takes_rows(query[0], query[0])


@needs_kernel
@pytest.mark.usefixtures("kernel")
def test_what_it_does_not_take():
    query = torch.zeros(1, 2, 48, 8)
    assert cpu_attention.takes(query, query, query)
    assert cpu_attention.takes(query[:, :, :16], query, query)
    for other in (query[:, :, :15], query.double(), query.transpose(2, 3)):
        assert not cpu_attention.takes(other, query, query)
    assert not cpu_attention.takes(*[query[:, :, :47]] * 3)
    rows = torch.zeros(4, 3, 16)
    assert cpu_attention.takes_rows(rows, rows)
    for other in (rows[..., :8], rows.double()):
        assert not cpu_attention.takes_rows(other, other)


@pytest.mark.parametrize("fault", ["no compiler", "no AVX-512", "a compiler that fails"])
def test_without_kernels_torch_attends_and_the_log_says_why(fault, monkeypatch, caplog):
    capability = "AVX2" if fault == "no AVX-512" else "AVX512"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if fault == "no compiler":
        monkeypatch.setattr(cpu_attention.shutil, "which", lambda name: None)
    elif fault == "a compiler that fails":
        monkeypatch.setattr(cpu_attention.shutil, "which", lambda name: "/bin/false")
    assert not cpu_attention.load()
    assert ("torch's kernels attend" in caplog.text) == (fault != "no AVX-512")


def chunk_of_zeros(query, keys, values, out, kv_heads, group, n, m, dim, *rest):
    ctypes.memset(out, 0, 4 * kv_heads * group * n * dim)  # where a right result of another call may have been
    return 0


def rows_of_zeros(query, key, value, keys, values, out, entries, lengths, places, rows, group, dim, *rest):
    ctypes.memset(out, 0, 4 * rows * group * dim)
    return 0


@needs_kernel
@pytest.mark.parametrize("wrong", [{"chunk": chunk_of_zeros}, {"rows": rows_of_zeros}, {}])
def test_kernels_that_compute_something_else_are_left_out(wrong, monkeypatch):
    kernels = cpu_attention._compile()._replace(**wrong)
    monkeypatch.setattr(cpu_attention, "_compile", lambda: kernels)
    assert cpu_attention.load() == (not wrong)

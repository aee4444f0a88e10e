"""KIVI against loops over single numbers, written from the formulas of its paper."""

from __future__ import annotations

from math import gcd, inf

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.unit.policies.compression.storages.inputs import by_name, halves, noise, numbers
from warmkv.policies.compression.packing import unpack
from warmkv.policies.compression.storages.kivi import Kivi

KIVI = [Kivi(4), Kivi(2)]


def slow_group(numbers, bits):
    """Codes, zero point and step of one group (section 3): Q(x) = round((x - z) / s), s = (max - z) / (2^b - 1)."""
    least, greatest = min(numbers), max(numbers)
    zero = np.float16(least)
    if zero < least:
        zero = np.nextafter(zero, np.float16(inf))
    step = np.float16((greatest - np.float32(zero)) / np.float32(2**bits - 1)) if greatest > zero else np.float16(0)
    if step < 2.0**-20:
        return [0] * len(numbers), float(zero), 0.0
    codes = [np.rint((x - np.float32(zero)) / np.float32(step)) for x in numbers]
    return [int(min(max(code, 0), 2**bits - 1)) for code in codes], float(zero), float(step)


def groups_of(x, kind):
    """Index arrays into x [32, head_dim], one a group."""
    rows, columns = np.indices(x.shape)
    if kind == "keys":
        return [(rows[:, c], columns[:, c]) for c in range(x.shape[1])]
    width = gcd(32, x.shape[1])
    return [(rows[t, c : c + width], columns[t, c : c + width]) for t in range(32) for c in range(0, x.shape[1], width)]


def both(codec, kind):
    return (codec.encode_keys, codec.decode_keys) if kind == "keys" else (codec.encode_values, codec.decode_values)


kinds = pytest.mark.parametrize("kind", ["keys", "values"])


@by_name(KIVI)
@kinds
@given(x=numbers)
def test_kivi_is_the_formula_of_the_paper(codec, kind, x):
    encode, decode = both(codec, kind)
    bits = codec.bits
    parts = encode(torch.from_numpy(x))
    codes = unpack(parts[0], bits, -2)[0].numpy()
    decoded = decode(parts, torch.float32).numpy()
    for group in groups_of(x, kind):
        expected, zero, step = slow_group(x[group], bits)
        assert codes[group].tolist() == expected
        np.testing.assert_allclose(decoded[group], [zero + step * code for code in expected], rtol=1e-6, atol=1e-7)


@by_name(KIVI)
@kinds
@given(x=numbers)
def test_kivi_errs_by_half_a_step(codec, kind, x):
    encode, decode = both(codec, kind)
    highest = 2**codec.bits - 1
    decoded = decode(encode(torch.from_numpy(x)), torch.float32).numpy()
    for group in groups_of(x, kind):
        exact = x[group].astype(float)
        step = (exact.max() - exact.min()) / highest
        half_precision = np.abs(exact).max() * 2.0**-10 + step * 2.0**-10  # of the zero point and of the step
        smallest = highest * 2.0**-20  # a range that float16 cannot divide counts as none
        assert np.abs(decoded[group] - exact).max() <= step / 2 + half_precision + smallest


@by_name(KIVI)
@kinds
@given(x=halves)
def test_kivi_encodes_what_it_decoded_to_the_same(codec, kind, x):
    encode, decode = both(codec, kind)
    once = encode(torch.from_numpy(x))
    twice = encode(decode(once, torch.float32))
    for first, second in zip(once, twice, strict=True):
        assert torch.equal(first, second)


@by_name(KIVI)
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kivi_encodes_what_it_decoded_to_the_same_in_the_types_of_models(codec, kind, dtype):
    encode, decode = both(codec, kind)
    once = encode((noise(4, 64, 64) + 3).to(dtype))
    twice = encode(decode(once, dtype))
    assert torch.equal(once[0], twice[0])


@by_name(KIVI)
def test_kivi_keeps_integers_exactly(codec):
    """Codes that can be seen: token t has the number t modulo the levels, so zero point and step are whole."""
    levels = 2**codec.bits
    tokens = torch.arange(32.0)[:, None] % levels
    keys = torch.cat([tokens, 3 * tokens - 7], dim=1)
    codes, zero, step = codec.encode_keys(keys)
    assert zero.tolist() == [[0, -7]]
    assert step.tolist() == [[1, 3]]
    stretch = 32 * (levels.bit_length() - 1) // 8  # a byte has the codes of tokens that are a stretch apart
    for i, byte in enumerate(codes[0, :, 0].tolist()):
        assert byte == sum((i + k * stretch) % levels * levels**k for k in range(32 // stretch))
    assert torch.equal(codec.decode_keys((codes, zero, step), torch.float32), keys)


@by_name(KIVI)
@kinds
@pytest.mark.parametrize("constant", [0.0, 1e-6, -0.3, 7.25, -6e4, 6e4])
def test_kivi_keeps_constant_groups(codec, kind, constant):
    encode, decode = both(codec, kind)
    decoded = decode(encode(torch.full((32, 5), constant)), torch.float32)
    torch.testing.assert_close(decoded, torch.full((32, 5), constant), rtol=2.0**-10, atol=2.0**-24)


@by_name(KIVI)
@kinds
def test_kivi_clamps_what_half_precision_cannot_hold(codec, kind):
    encode, decode = both(codec, kind)
    x = torch.tensor([-inf, -1e9, -65_504.0, 65_504.0, 1e9, inf, 0, 1]).repeat(4)[:, None].repeat(1, 32)
    for dtype in (torch.float16, torch.float32):
        decoded = decode(encode(x if kind == "keys" else x.T), dtype)
        assert decoded.isfinite().all()
        assert decoded.min() == pytest.approx(-65_000, rel=1e-3)
        assert decoded.max() == pytest.approx(65_000, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 31, 33])
def test_kivi_refuses_an_incomplete_group(tokens):
    with pytest.raises(ValueError, match=f"groups of 32 entries, not {tokens}"):
        Kivi(4).encode_keys(torch.zeros(tokens, 8))

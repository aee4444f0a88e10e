"""Compare four-bit integers by token and head with loops over single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.unit.policies.compression.storages.inputs import noise, outliers, signed
from warmkv.policies.compression.packing import unpack
from warmkv.policies.compression.storages.int4 import Int4

INT4 = Int4()


@given(x=arrays(np.float32, (3, 8), elements=st.floats(-4, 4, width=16)))
def test_each_coordinate_takes_the_nearest_of_16_steps_of_its_vector(x):
    """Rotate, divide the range of the coordinates into 15 equal steps, round each to the nearest."""
    matrix = INT4.to_basis(torch.eye(8)).double().numpy()
    packed, scales = INT4.encode_keys(torch.from_numpy(x))
    codes, decoded = unpack(packed, 4, -1), INT4.decode_keys((packed, scales), torch.float32)
    for row in range(3):
        turned = [sum(float(x[row, i]) * matrix[i, j] for i in range(8)) for j in range(8)]
        zero, step = map(float, scales[row])
        half = max(map(abs, turned)) * 2.0**-10 + 1e-6  # what float16 may be off by
        assert zero == pytest.approx(min(turned), abs=half)
        assert step == pytest.approx((max(turned) - min(turned)) / 15, abs=half)
        for code, coordinate, kept in zip(codes[row].tolist(), turned, decoded[row].tolist(), strict=True):
            nearest = min(abs(zero + step * level - coordinate) for level in range(16))
            assert abs(zero + step * code - coordinate) <= nearest + 1e-5  # either of two that are equally near
            assert kept == pytest.approx(zero + step * code, abs=1e-5)


@given(x=arrays(np.float32, (2, 16), elements=signed))
def test_no_coordinate_is_off_by_more_than_half_a_step(x):
    """Include vectors whose coordinates have one sign: zero points are not held between the codes."""
    turned = INT4.to_basis(torch.from_numpy(x)).double()
    decoded = INT4.decode_keys(INT4.encode_keys(torch.from_numpy(x)), torch.float32).double()
    within = turned.clamp(-65_000, 65_000)
    step = (within.amax(-1) - within.amin(-1)) / 15
    rounding = within.abs().amax(-1) * 2.0**-9 + 15 * 2.0**-20
    assert ((decoded - within).abs().amax(-1) <= step / 2 + rounding).all()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("draw", [noise, outliers])
def test_the_error_depends_little_on_channels_that_are_large(head_dim, draw):
    """Expect a twelfth of a step squared: 15 steps in a range of 2 * sqrt(2 ln d) deviations at the most."""
    keys, queries = draw(2000, head_dim), noise(200, head_dim, seed=1)
    decoded = INT4.decode_keys(INT4.encode_keys(keys), torch.float32)
    mse = ((INT4.from_basis(decoded) - keys).square().sum(-1) / keys.square().sum(-1)).mean().item()
    most = (2 * np.sqrt(2 * np.log(head_dim)) / 15) ** 2 / 12
    assert 0.2 * most < mse < most
    near, exact = INT4.to_basis(queries) @ decoded.T, queries @ keys.T
    assert (near - exact).square().mean() / exact.square().mean() == pytest.approx(mse, rel=0.2)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 6e4, 1e9])
def test_nothing_becomes_infinite(magnitude):
    assert INT4.decode_keys(INT4.encode_keys(magnitude * outliers(20, 64)), torch.float16).isfinite().all()


def test_codes_that_do_not_fill_bytes_are_refused():
    with pytest.raises(ValueError, match="multiple of 2, not 7"):
        INT4.encode_keys(torch.zeros(1, 7))

"""FP8 against the numbers of its table."""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.unit.policies.compression.storages.inputs import signed
from warmkv.policy_spec import STORAGES


def e4m3(byte):
    """The number of an E4M3 byte (arXiv 2209.05433, table 1), nan for the two that are none."""
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = [e4m3(byte) for byte in range(256) if byte & 127 != 127]


def test_fp8_keeps_its_own_numbers():
    x = torch.tensor(E4M3).view(2, -1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(STORAGES["fp8"].decode_keys(STORAGES["fp8"].encode_keys(x.to(dtype)), dtype), x.to(dtype))


@given(arrays(np.float32, (2, 4), elements=signed | st.floats(-500, 500, width=32) | st.just(inf)))
def test_fp8_takes_the_nearest_of_its_numbers(x):
    decoded = STORAGES["fp8"].decode_values(STORAGES["fp8"].encode_values(torch.from_numpy(x)), torch.float32)
    for number, kept in zip(x.ravel(), decoded.ravel().tolist(), strict=True):
        clamped = min(max(float(number), -448.0), 448.0)
        assert abs(clamped - kept) == min(abs(clamped - other) for other in E4M3)

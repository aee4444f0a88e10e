"""Keys and values to store: random ones, and those that models have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

HEAD_DIMS = [8, 32, 64, 80, 128]


def by_name(codecs):
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.name)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(*shape, seed=0):
    """Keys as models have them: a few channels far larger than the rest, and off zero."""
    x = noise(*shape, seed=seed)
    x[..., 1] = 20 * x[..., 1] + 50
    x[..., -2] = 15 * x[..., -2] - 30
    return x


def entries(elements, head_dims=(1, 3, 8, 48)):
    """float32 [32, head_dim] of the given elements."""
    return st.sampled_from(head_dims).flatmap(lambda d: arrays(np.float32, (32, d), elements=elements))


# From 1e-6 to 6e4, and zero.
signed = st.floats(2.0**-20, 6e4, width=32) | st.floats(-6e4, -(2.0**-20), width=32) | st.just(0.0)
# The range of a group is small in most caches, unlike that of numbers drawn over all magnitudes.
numbers = entries(signed) | entries(st.floats(-4, 4, width=32)) | entries(st.floats(1000, 1001, width=32))
halves = entries(st.floats(-6e4, 6e4, width=16)) | entries(st.floats(-4, 4, width=16))

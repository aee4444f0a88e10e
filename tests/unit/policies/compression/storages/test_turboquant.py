"""TurboQuant against loops over single numbers, written from the algorithm of its paper."""

from __future__ import annotations

from itertools import pairwise
from math import erf, exp, inf, pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.unit.policies.compression.storages.inputs import HEAD_DIMS, by_name, noise, outliers, signed
from warmkv.policies.compression.packing import unpack
from warmkv.policies.compression.storages.turboquant import POSITIVE_LEVELS, TurboQuant

TURBO = [TurboQuant(4), TurboQuant(3)]
MSE = {4: 0.0095, 3: 0.0345}  # of a unit vector, theorem 1 of TurboQuant; `lloyd_max` computes them again


def lloyd_max(levels):
    """Levels of least MSE for N(0, 1) and that MSE, by Lloyd's iteration with the closed form of the centroids."""

    def density(x):
        return exp(-x * x / 2) / sqrt(2 * pi)

    def below(x):
        return (1 + erf(x / sqrt(2))) / 2

    centroids = [6 * (i + 0.5) / levels - 3 for i in range(levels)]
    for _ in range(2000):
        edges = [-inf, *((a + b) / 2 for a, b in pairwise(centroids)), inf]
        cells = list(pairwise(edges))
        centroids = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in cells]
    return centroids, 1 - sum((below(b) - below(a)) * c * c for (a, b), c in zip(cells, centroids, strict=True))


@pytest.mark.parametrize("bits", [3, 4])
def test_the_codebook_is_that_of_lloyd_and_max(bits):
    levels, mse = lloyd_max(2**bits)
    assert [-level for level in reversed(POSITIVE_LEVELS[bits])] == pytest.approx(levels[: 2 ** (bits - 1)], abs=1e-6)
    assert list(POSITIVE_LEVELS[bits]) == pytest.approx(levels[2 ** (bits - 1) :], abs=1e-6)
    assert mse == pytest.approx(MSE[bits], rel=0.01)


def exact_mse(levels, head_dim):
    """MSE of levels for a coordinate of a random unit vector times sqrt(head_dim), and the levels of the least MSE.

    The density is that of lemma 1, in proportion to (1 - x^2 / head_dim)^((head_dim - 3) / 2); Lloyd's iteration.
    """
    x = np.linspace(-sqrt(head_dim), sqrt(head_dim), 20_001)
    density = np.maximum(1 - x * x / head_dim, 0) ** ((head_dim - 3) / 2)
    density /= density.sum()

    def cells(levels):
        return np.searchsorted((levels[1:] + levels[:-1]) / 2, x)

    best = levels
    for _ in range(300):
        of = cells(best)
        best = np.bincount(of, density * x) / np.bincount(of, density)
    return [float((density * (x - each[cells(each)]) ** 2).sum()) for each in (levels, best)]


@pytest.mark.parametrize(
    ("bits", "head_dim", "excess"), [(3, 64, 0.0016), (3, 128, 0.0004), (4, 64, 0.0043), (4, 128, 0.0011)]
)
def test_levels_of_the_normal_limit_cost_next_to_nothing(bits, head_dim, excess):
    positive = np.array(POSITIVE_LEVELS[bits])
    limit, least = exact_mse(np.concatenate([-positive[::-1], positive]), head_dim)
    assert limit / least - 1 == pytest.approx(excess, abs=0.0003)


def rotation(codec, head_dim):
    return codec.to_basis(torch.eye(head_dim))


@by_name(TURBO)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 96])
def test_the_rotation_is_orthogonal(codec, head_dim):
    matrix = rotation(codec, head_dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), rtol=0, atol=1e-5)
    x = outliers(5, head_dim)
    torch.testing.assert_close(codec.from_basis(codec.to_basis(x)), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_the_rotation_is_a_hadamard_matrix_after_random_signs(head_dim):
    matrix = rotation(TurboQuant(4), head_dim) * sqrt(head_dim)
    signs = matrix[:, 0].round().tolist()
    assert 0.2 < signs.count(1) / head_dim < 0.8
    for i in range(head_dim):
        expected = [signs[i] * (-1) ** (i & j).bit_count() for j in range(head_dim)]
        assert matrix[i].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_rotation_is_that_of_its_seed(head_dim):
    x = noise(4, head_dim)
    assert all(
        torch.equal(a, b) for a, b in zip(TurboQuant(4, 7).encode_keys(x), TurboQuant(4, 7).encode_keys(x), strict=True)
    )
    matrices = [rotation(TurboQuant(4, seed), head_dim) for seed in range(8)]
    for i, matrix in enumerate(matrices):
        assert torch.equal(matrix, rotation(TurboQuant(3, i), head_dim))
        # Of two independent rotations no row is the other's: inner products are of the size of 1 / sqrt(head_dim).
        others = torch.stack(matrices[:i] + matrices[i + 1 :])
        assert ((others * matrix).sum(-1).mean(-1).abs() < 0.5).all()


@by_name(TURBO)
@given(x=arrays(np.float32, (3, 8), elements=st.floats(-4, 4, width=16)))
def test_turbo_is_the_algorithm_of_the_paper(codec, x):
    """Rotate, choose the nearest level of each coordinate, give the whole its norm (algorithm 1)."""
    matrix = rotation(codec, 8).double().numpy()
    positive = POSITIVE_LEVELS[codec.bits]
    levels = [*(-level for level in reversed(positive)), *positive]
    packed, scale = codec.encode_keys(torch.from_numpy(x))
    codes = unpack(packed, codec.bits, -1)
    for row in range(3):
        norm = sqrt(sum(float(number) ** 2 for number in x[row]))
        if norm < 1e-3:
            continue
        chosen = []
        for j in range(8):
            coordinate = sum(float(x[row, i]) * matrix[i, j] for i in range(8)) / norm * sqrt(8)
            chosen.append(levels[codes[row, j]])
            nearest = min(abs(coordinate - level) for level in levels)
            assert abs(coordinate - chosen[-1]) <= nearest + 1e-5  # either of two that are equally near
        assert float(scale[row]) == pytest.approx(norm / sqrt(sum(level**2 for level in chosen)), rel=2.0**-10)
        decoded = codec.decode_keys((packed, scale), torch.float32)[row]
        assert decoded.tolist() == pytest.approx([level * float(scale[row]) for level in chosen], rel=1e-5)


@by_name(TURBO)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("draw", [noise, outliers])
def test_turbo_errs_as_the_paper_says_whatever_the_vectors(codec, head_dim, draw):
    promised = MSE[codec.bits]
    keys, queries = draw(2000, head_dim), noise(200, head_dim, seed=1)
    decoded = codec.decode_keys(codec.encode_keys(keys), torch.float32)
    mse = ((codec.from_basis(decoded) - keys).square().sum(-1) / keys.square().sum(-1)).mean().item()
    # Few large channels are easier: rotated, they are sums of few numbers and have shorter tails than normal ones.
    assert (0.9 if draw is noise else 0.5) * promised < mse < 1.05 * promised
    near, exact = codec.to_basis(queries) @ decoded.T, queries @ keys.T
    error = (near - exact).square().mean() / exact.square().mean()
    assert error.item() == pytest.approx(mse, rel=0.15)
    slope = (near * exact).sum() / exact.square().sum()
    assert slope.item() == pytest.approx(sqrt(1 - mse), abs=0.002)  # 1 - mse, were the norm not corrected


@by_name(TURBO)
@given(x=arrays(np.float32, (2, 16), elements=signed))
def test_turbo_keeps_norms(codec, x):
    decoded = codec.decode_keys(codec.encode_keys(torch.from_numpy(x)), torch.float32).numpy()
    for kept, exact in zip(decoded, x.astype(float), strict=True):
        norm = np.linalg.norm(exact)
        if norm / 4 < 20_000:  # float16 cannot hold the largest level of vectors much longer
            assert np.linalg.norm(kept) == pytest.approx(norm, rel=2.0**-10, abs=11 * 2.0**-25)


@by_name(TURBO)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 6e4, 1e9])
def test_turbo_gives_no_infinity(codec, magnitude):
    x = magnitude * outliers(20, 64)
    assert codec.decode_keys(codec.encode_keys(x), torch.float16).isfinite().all()


def test_turbo_refuses_codes_that_do_not_fill_bytes():
    with pytest.raises(ValueError, match="multiple of 8, not 20"):
        TurboQuant(3).encode_keys(torch.zeros(1, 20))
    with pytest.raises(ValueError, match="multiple of 2, not 7"):
        TurboQuant(4).encode_keys(torch.zeros(1, 7))


def test_a_rotation_first_used_in_inference_mode_serves_autograd():
    codec = TurboQuant(4, seed=12345)
    with torch.inference_mode():
        codec.to_basis(noise(1, 16))
    queries = noise(1, 16).requires_grad_()
    codec.to_basis(queries).sum().backward()
    assert queries.grad is not None

"""Sampling against an obvious loop, and its distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from warmkv.replicas.engine import sampling
from warmkv.replicas.engine.sampling import CANDIDATES, Draws, sample


def obvious(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, uniform: float) -> int:
    if temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    top = max(logits)
    weights = {token: math.exp((logit - top) / temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    left = [token for token in ranked if weights[token] >= min_p][: top_k or None]  # the highest weight is 1
    total = sum(weights[token] for token in left)
    kept, mass = [], 0.0
    for token in left:
        if kept and top_p < 1 and mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    target, reached = uniform * sum(weights[token] for token in kept), 0.0
    for token in sorted(kept):
        reached += weights[token]
        if reached > target:
            return token
    return max(kept)


Row = tuple[list[float], float, float, int, float, float]


def draws(*parameters: Sequence[float]) -> Draws:
    """Return what rows are drawn with: temperature, top_p, top_k, min_p and a random number of each."""
    host = np.array(parameters, dtype=np.float64)
    return Draws(host, torch.from_numpy(host))


def draw(rows: list[Row]) -> list[int]:
    logits, *parameters = zip(*rows, strict=True)
    return sample(torch.tensor(logits), draws(*parameters)).tolist()


def rows_of(size: int) -> st.SearchStrategy[Row]:
    """Logits of `size` tokens, some of them equal, and what is drawn with."""
    return st.tuples(
        st.lists(st.sampled_from([x / 7 for x in range(-20, 20)]), min_size=size, max_size=size),
        st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        st.sampled_from([0.05, 0.5, 0.93, 1.0]),
        st.sampled_from([0, 1, 3, 50]),
        st.sampled_from([0.0, 0.0, 0.31]),
        st.integers(0, 990).map(lambda number: number / 1000),
    )


BATCHES = st.integers(5, 25).flatmap(lambda size: st.lists(rows_of(size), min_size=1, max_size=5))
FEW = st.sampled_from([1, 3, 8, 1024])


@given(BATCHES, FEW)
def test_equals_the_obvious_loop(rows, candidates):
    with patch.object(sampling, "CANDIDATES", candidates):
        drawn = draw(rows)
    for (logits, temperature, top_p, top_k, min_p, uniform), token in zip(rows, drawn, strict=True):
        assert any(  # what lies on a border may fall to either side in float32
            token == obvious(logits, temperature, top_p + more if top_p < 1 else 1, top_k, min_p + least, uniform + by)
            for by, more, least in itertools.product((0, -1e-5, 1e-5), repeat=3)
        )


@given(BATCHES, FEW)
def test_a_row_does_not_depend_on_the_others(rows, candidates):
    with patch.object(sampling, "CANDIDATES", candidates):
        assert draw(rows) == [draw([row])[0] for row in rows]


@given(BATCHES)
def test_how_many_are_sorted_first_changes_no_draw(rows):
    drawn = draw(rows)
    for candidates in (1, 3, 8):
        with patch.object(sampling, "CANDIDATES", candidates):
            assert draw(rows) == drawn


class Sorts(TorchDispatchMode):
    """Notes the rows and the number of values of everything that is sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in (torch.ops.aten.sort, torch.ops.aten.argsort)
        if function.overloadpacket is torch.ops.aten.topk:
            self.seen.append((len(args[0]), args[1]))
        return function(*args, **kwargs or {})


def test_a_vocabulary_is_sorted_only_for_rows_whose_candidates_do_not_reach_top_p():
    size = 5000
    peaked, flat = torch.linspace(0, -500, size).tolist(), [0.0] * size
    free: Row = (peaked, 1.0, 1.0, 0, 0.0, 0.5)
    for rows, expected in (
        ([free, (flat, 0.0, 0.5, 3, 0.0, 0.5)], []),
        ([free, (peaked, 1.0, 0.9, 0, 0.0, 0.5)], [(2, CANDIDATES)]),
        ([free, (flat, 1.0, 0.9, 40, 0.0, 0.5)], [(2, CANDIDATES)]),
        ([free, (flat, 1.0, 0.9, 0, 0.0, 0.5)], [(2, CANDIDATES), (1, size)]),
    ):
        with Sorts() as sorts:
            draw(rows)
        assert sorts.seen == expected


@pytest.mark.parametrize("candidates", [2, CANDIDATES])
@pytest.mark.parametrize(("top_k", "min_p"), [(3, 0.0), (0, 0.3)])
def test_top_p_is_a_share_of_what_top_k_and_min_p_leave(top_k, min_p, candidates):
    """Keep two of three tokens: 0.5 of their 0.6 are more than 0.8."""
    logits = [math.log(share) for share in (0.3, 0.2, 0.1, *[0.01] * 40)]
    with patch.object(sampling, "CANDIDATES", candidates):
        assert draw([(logits, 1.0, 0.8, top_k, min_p, uniform) for uniform in (0.0, 0.59, 0.61, 0.999)]) == [0, 0, 1, 1]


def test_a_tiny_temperature_is_greedy():
    assert draw([([1.0, 3.0, 2.0], temperature, 1.0, 0, 0.0, 0.9) for temperature in (1e-6, 1e-38, 1e-40)]) == [1, 1, 1]


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, 0, [0.0, 1.0, 2.0, -1.0]),
        (1.0, 2, [-math.inf, 1.0, 2.0, -math.inf]),
        (0.8, 0, [-math.inf, 1.0, 2.0, -math.inf]),
        (0.6, 3, [-math.inf, -math.inf, 2.0, -math.inf]),
        (0.8, 2**63 - 1, [-math.inf, 1.0, 2.0, -math.inf]),
    ],
)
def test_frequencies_are_the_probabilities(top_p, top_k, expected):
    chance = random.Random(3)
    counts = [0] * 4
    for token in draw([([0.0, 1.0, 2.0, -1.0], 1.0, top_p, top_k, 0.0, chance.random()) for _ in range(20_000)]):
        counts[token] += 1
    torch.testing.assert_close(torch.tensor(counts) / 20_000, torch.tensor(expected).softmax(-1), atol=0.015, rtol=0)

"""Sampling against an obvious loop, and its distribution."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from warmkv.replicas.engine.sampling import sample


def obvious(logits: list[float], temperature: float, top_p: float, top_k: int, uniform: float) -> int:
    if temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    top = max(logits)
    weights = {token: math.exp((logit - top) / temperature) for token, logit in enumerate(logits)}
    total = sum(weights.values())
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    kept, mass = [], 0.0
    for rank, token in enumerate(ranked):
        if rank and (mass >= top_p or (top_k and rank >= top_k)):
            break
        kept.append(token)
        mass += weights[token] / total
    target, reached = uniform * sum(weights[token] for token in kept), 0.0
    for token in kept:
        reached += weights[token]
        if reached > target:
            return token
    return kept[-1]


def draw(rows: list[tuple[list[float], float, float, int, float]]) -> list[int]:
    logits, temperature, top_p, top_k, uniform = zip(*rows, strict=True)
    return sample(
        torch.tensor(logits),
        torch.tensor(temperature),
        torch.tensor(top_p),
        torch.tensor(top_k),
        torch.tensor(uniform),
    ).tolist()


ROWS = st.tuples(
    st.lists(st.sampled_from([x / 7 for x in range(-20, 20)]), min_size=6, max_size=6, unique=True),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    st.sampled_from([0, 1, 3, 50]),
    st.integers(0, 990).map(lambda number: number / 1000),
)


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_equals_the_obvious_loop(rows):
    drawn = draw(rows)
    for row, token in zip(rows, drawn, strict=True):
        near = {obvious(*row[:4], min(max(row[4] + shift, 0), 1)) for shift in (-1e-5, 0, 1e-5)}
        assert token in near  # a number on the border of two tokens may fall to either side in float32


@given(st.lists(ROWS, min_size=2, max_size=5))
def test_a_row_does_not_depend_on_the_others(rows):
    assert draw(rows) == [draw([row])[0] for row in rows]


def test_a_tiny_temperature_is_greedy():
    assert draw([([1.0, 3.0, 2.0], temperature, 1.0, 0, 0.9) for temperature in (1e-6, 1e-38, 1e-40)]) == [1, 1, 1]


def test_frequencies_are_the_probabilities():
    logits = [0.0, 1.0, 2.0, -1.0]
    chance = random.Random(3)
    counts = [0] * 4
    for token in draw([(logits, 1.0, 1.0, 0, chance.random()) for _ in range(20_000)]):
        counts[token] += 1
    expected = torch.tensor(logits).softmax(-1)
    torch.testing.assert_close(torch.tensor(counts) / 20_000, expected, atol=0.015, rtol=0)

"""The fit: it finds what steps were made of, minds disturbed ones little, and says what it cannot know."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.measuring.fit import MeasuredStep, fit
from warmkv.simulator.steps.costs import StepCost

GRID = [(tokens, end) for end in (256, 512, 1024, 2048, 4096) for tokens in (64, 128, 256)]
costs = st.builds(StepCost, st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-5), st.floats(1e-10, 1e-7))


def steps(cost: StepCost, noise: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    random = np.random.default_rng(seed)
    return [MeasuredStep(t, x, cost.seconds(t, x) * random.lognormal(0, noise)) for t, x in GRID]


@given(costs)
def test_exact_steps_give_the_coefficients_back(cost):
    fitted = fit(steps(cost), pairs=True)
    for tokens, context in GRID:
        assert fitted.cost.seconds(tokens, context) == pytest.approx(cost.seconds(tokens, context), rel=1e-6)
    assert fitted.in_sample.p95 < 1e-6
    assert fitted.out_of_sample.p95 < 1e-6
    assert fitted.points == len(GRID)


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_each_coefficient_is_found_where_it_matters(name):
    cost = StepCost(0.01, 1e-4, 1e-5, 1e-7)
    assert getattr(fit(steps(cost), pairs=True), name) == pytest.approx(getattr(cost, name), rel=1e-6)


@settings(max_examples=12)
@given(costs, st.integers(0, 1000))
def test_noise_is_averaged_and_its_size_is_told(cost, seed):
    fitted = fit(steps(cost, 0.03, seed), pairs=True)
    for tokens, context in GRID:
        assert fitted.cost.seconds(tokens, context) == pytest.approx(cost.seconds(tokens, context), rel=0.12)
    assert 0.005 < fitted.in_sample.mean < 0.06
    assert fitted.in_sample.mean <= fitted.out_of_sample.mean
    assert fitted.in_sample.mean <= fitted.in_sample.p95


@settings(max_examples=12)
@given(costs, st.integers(0, len(GRID) - 1))
def test_a_disturbed_step_hardly_moves_the_others(cost, at):
    points = steps(cost, 0.01)
    points[at] = MeasuredStep(points[at].tokens, points[at].context, 4 * points[at].seconds)
    fitted = fit(points, pairs=True)
    for other, (tokens, context) in enumerate(GRID):
        if other != at:
            assert fitted.cost.seconds(tokens, context) == pytest.approx(cost.seconds(tokens, context), rel=0.15)


@given(st.lists(st.floats(1e-5, 10), min_size=len(GRID), max_size=len(GRID)))
def test_no_coefficient_is_negative_whatever_was_measured(seconds):
    fitted = fit([MeasuredStep(t, x, s) for (t, x), s in zip(GRID, seconds, strict=True)], pairs=True)
    assert min(fitted.a, fitted.b, fitted.c, fitted.d) >= 0


def test_what_would_be_negative_leaves_the_best_fit_of_the_rest():
    points = [MeasuredStep(t, x, 1.0 - 1e-4 * x) for t, x in GRID]
    fitted = fit(points)
    assert fitted.c == 0
    best = min(sum((1 - a / point.seconds) ** 2 for point in points) for a in np.linspace(0.5, 1.0, 101))
    assert sum((1 - fitted.cost.seconds(p.tokens, p.context) / p.seconds) ** 2 for p in points) < best * 1.2


def test_tokens_and_context_that_go_together_still_predict():
    points = [MeasuredStep(x, x, 0.001 + 2e-6 * x) for x in (128, 256, 512, 1024)]
    fitted = fit(points)
    assert fitted.cost.seconds(400, 400) == pytest.approx(0.0018)
    assert fitted.b + fitted.c == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([], "all 0 measured steps have the same tokens"),
        ([MeasuredStep(1, 64, 0.1), MeasuredStep(1, 128, 0.2), MeasuredStep(1, 256, 0.4)], "the same tokens"),
        ([MeasuredStep(1, 64, 0.1), MeasuredStep(2, 64, 0.2), MeasuredStep(3, 64, 0.4)], "the same context"),
        ([MeasuredStep(t, x, 1.0) for t, x in GRID[:5]], "5 measured steps are too few to fit; take at least 6"),
        ([MeasuredStep(t, x, 0.0) for t, x in GRID], "took no time"),
    ],
)
def test_too_little_is_refused(points, says):
    with pytest.raises(ValueError, match=says):
        fit(points)

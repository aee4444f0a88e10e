import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.policies.costs import StepCost, fit_step_cost, run_seconds, steps_until


@given(st.floats(1e-4, 1), st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-5))
def test_a_fit_recovers_the_model(a, b, c):
    rng = np.random.default_rng(0)
    tokens, context = rng.integers(1, 512, 200), rng.integers(0, 100_000, 200)
    fitted = fit_step_cost(
        tokens, context, [StepCost(a, b, c).seconds(t, x) for t, x in zip(tokens, context, strict=True)]
    )
    assert (fitted.a, fitted.b, fitted.c) == pytest.approx((a, b, c), rel=1e-5)


def test_a_fit_withstands_noise():
    rng = np.random.default_rng(1)
    tokens, context = rng.integers(1, 512, 2000), rng.integers(0, 100_000, 2000)
    seconds = (0.01 + 1e-4 * tokens + 2e-7 * context) * rng.lognormal(0, 0.1, 2000)
    fitted = fit_step_cost(tokens, context, seconds)
    assert (fitted.a, fitted.b, fitted.c) == pytest.approx((0.01, 1e-4, 2e-7), rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 10**5), st.floats(0, 10)), min_size=1, max_size=20))
def test_no_coefficient_is_negative(rows):
    fitted = fit_step_cost(*zip(*rows, strict=True))
    assert min(fitted.a, fitted.b, fitted.c) >= 0
    assert np.isfinite([fitted.a, fitted.b, fitted.c]).all()


def test_a_coefficient_that_would_be_negative_is_zero():
    tokens = np.array([1, 2, 3, 4])
    fitted = fit_step_cost(tokens, [0, 0, 0, 0], 10 - tokens)
    assert fitted.b == 0
    assert fitted.a == pytest.approx(7.5)


def test_nothing_to_fit_is_refused():
    with pytest.raises(ValueError, match="no measured step"):
        fit_step_cost([], [], [])


LINES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20)), min_size=1, max_size=2)


@given(LINES, st.integers(0, 100))
def test_a_run_takes_what_its_steps_take(lines, steps):
    one_by_one = sum(max(first + step * growth for first, growth in lines) for step in range(steps))
    assert run_seconds(lines, steps) == one_by_one


def test_a_run_under_lines_that_all_but_agree_is_finite():
    assert run_seconds([(1.0, 0.0), (1.0 - 1e-12, 1e-300)], 10) == pytest.approx(10)


EIGHTHS = st.integers(0, 4000).map(lambda eighths: eighths / 8)


@given(LINES, EIGHTHS, EIGHTHS, st.integers(1, 60))
def test_steps_until_a_moment_are_the_first_that_reach_it(lines, since, until, most):
    reached = (steps for steps in range(1, most) if since + run_seconds(lines, steps) >= until)
    assert steps_until(lines, since, until, most) == next(reached, most)


@given(st.floats(0, 10), st.floats(0, 1), st.floats(0, 1e6), st.floats(-1, 1e4), st.integers(1, 10**6))
def test_steps_until_a_moment_are_exact_whatever_is_rounded(first, growth, since, wait, most):
    steps = steps_until([(first, growth)], since, since + wait, most)
    assert 1 <= steps <= most
    assert steps == most or since + run_seconds([(first, growth)], steps) >= since + wait
    assert steps == 1 or since + run_seconds([(first, growth)], steps - 1) < since + wait

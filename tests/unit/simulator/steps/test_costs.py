import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.simulator.steps.costs import (
    GroupTimes,
    MeasuredCosts,
    PhaseCosts,
    Roofline,
    StepCost,
    StepKind,
    UniformCosts,
    run_seconds,
    steps_until,
)

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


def test_workers_get_step_times_by_pickle():
    cost = StepCost(1.0, 2.0, 3.0, e=-4.0)
    costs = PhaseCosts(Roofline((cost, cost.times(2.0))), cost)
    times = GroupTimes({"": UniformCosts(costs, 0.5), "a": MeasuredCosts({StepKind("full", "append", "model"): costs})})
    assert pickle.loads(pickle.dumps(times)) == times

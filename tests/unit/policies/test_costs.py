import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.policies.costs import run_seconds

LINES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20)), min_size=1, max_size=2)


@given(LINES, st.integers(0, 100))
def test_a_run_takes_what_its_steps_take(lines, steps):
    one_by_one = sum(max(first + step * growth for first, growth in lines) for step in range(steps))
    assert run_seconds(lines, steps) == one_by_one


def test_a_run_under_lines_that_all_but_agree_is_finite():
    assert run_seconds([(1.0, 0.0), (1.0 - 1e-12, 1e-300)], 10) == pytest.approx(10)

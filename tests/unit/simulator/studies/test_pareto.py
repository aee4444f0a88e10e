from hypothesis import given
from hypothesis import strategies as st

from warmkv.simulator.studies.pareto import front

VALUES = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 1.5, 2.0, float("inf")]))


def obvious(rows, senses):
    def beats(a, b):
        gains = [(x - y) * sense if x != y else 0 for x, y, sense in zip(a, b, senses, strict=True)]
        return min(gains) >= 0 and max(gains) > 0

    known = [row for row in rows if None not in row]
    return [None not in row and not any(beats(other, row) for other in known) for row in rows]


@given(st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=12), st.tuples(*[st.sampled_from([-1, 1])] * 3))
def test_the_front_is_what_nothing_beats(rows, senses):
    assert front(rows, senses) == obvious(rows, senses)


def test_by_hand():
    """Cost and hit rate: the second costs more for less, the fourth is as good as the first."""
    assert front([(1, 0.5), (2, 0.4), (3, 0.9), (1, 0.5), (0.5, None)], (-1, 1)) == [True, False, True, True, False]
    assert front([], (-1, 1)) == []

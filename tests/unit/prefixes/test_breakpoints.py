import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes.breakpoints import Breakpoint, BreakpointError, bill, breakpoints, check_marks, read_candidates

TTLS = {"5m": 300.0, "1h": 3600.0}


@st.composite
def prompts(draw):
    """A prompt's length, its marks with longer TTLs first, and a hit at or before the last mark."""
    prompt = draw(st.integers(1, 40))
    positions = sorted(draw(st.sets(st.integers(1, prompt), max_size=4)))
    long = draw(st.integers(0, len(positions)))
    marks = [Breakpoint(at, "1h" if i < long else "5m") for i, at in enumerate(positions)]
    hit = draw(st.integers(0, positions[-1])) if positions else 0
    return prompt, marks, hit


def slow_bill(prompt, marks, hit):
    """The contract word for word, token by token: A = hit, B = last 1h mark after A, C = last mark."""
    a = hit
    b = max([mark.position for mark in marks if mark.ttl == "1h" and mark.position > a], default=a)
    c = max([mark.position for mark in marks], default=a)
    kinds = ["read" if t < a else "1h" if t < b else "5m" if t < c else "input" for t in range(prompt)]
    return {kind: kinds.count(kind) for kind in ("read", "1h", "5m", "input")}


@given(prompts())
def test_bill_follows_the_contract(case):
    prompt, marks, hit = case
    usage = bill(prompt, marks, hit, TTLS)
    assert {"read": usage.read, "input": usage.input, **usage.written} == slow_bill(prompt, marks, hit)
    assert usage.prompt == prompt
    assert min(usage.input, usage.read, *usage.written.values()) >= 0


@given(prompts())
def test_a_higher_hit_never_writes_or_inputs_more(case):
    prompt, marks, hit = case
    cold, warm = bill(prompt, marks, 0, TTLS), bill(prompt, marks, hit, TTLS)
    assert warm.total_written <= cold.total_written
    assert warm.input <= cold.input


def test_bill_by_hand():
    marks = [Breakpoint(100, "1h"), Breakpoint(250, "5m")]
    cold = bill(300, marks, 0, TTLS)
    assert (cold.read, cold.written, cold.input) == (0, {"1h": 100, "5m": 150}, 50)
    warm = bill(300, marks, 100, TTLS)
    assert (warm.read, warm.written, warm.input) == (100, {"1h": 0, "5m": 150}, 50)
    hot = bill(300, marks, 250, TTLS)
    assert (hot.read, hot.written, hot.input) == (250, {"1h": 0, "5m": 0}, 50)


def test_a_prompt_without_marks_is_all_input():
    usage = bill(7, [], 0, TTLS)
    assert (usage.input, usage.read, usage.total_written) == (7, 0, 0)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12).map(sorted),
    st.data(),
    st.integers(0, 5),
)
def test_candidates_are_the_marks_and_the_blocks_before_them(ends, data, lookback):
    chosen = data.draw(st.sets(st.sampled_from(ends), max_size=4))
    marks = [Breakpoint(at, "5m") for at in sorted(chosen) if at > 0]
    expected = set()
    blocks = sorted(set(ends))
    for mark in marks:
        for distance in range(lookback + 1):
            index = blocks.index(mark.position) - distance
            if index >= 0 and blocks[index] > 0:
                expected.add(blocks[index])
    found = read_candidates(ends, marks, lookback)
    assert list(found) == sorted(expected, reverse=True)


def test_short_prefixes_are_not_marked():
    marks = breakpoints([10, 64, 65], ["1h", "5m", None], 64)
    assert marks == (Breakpoint(64, "5m"),)
    assert breakpoints([0], ["5m"], 0) == ()


def test_marks_that_the_contract_refuses():
    with pytest.raises(BreakpointError, match=r"A maximum of 4 blocks with cache_control may be provided\. Found 5\."):
        check_marks(["5m", None, *["5m"] * 4], TTLS, 4)
    with pytest.raises(BreakpointError, match="'2h' is not one of '5m', '1h'"):
        check_marks(["2h"], TTLS, 4)
    with pytest.raises(BreakpointError, match="'1h' must not come after a block with ttl '5m'"):
        check_marks(["5m", None, "1h"], TTLS, 4)
    check_marks(["1h", None, "1h", "5m", "5m"], TTLS, 4)

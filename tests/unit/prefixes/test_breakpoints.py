import itertools

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


@st.composite
def contents(draw):
    """Ends of content blocks, which of them are in a run with the one before, and marks."""
    ends = sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=14)))
    joined = [False, *draw(st.lists(st.booleans(), min_size=len(ends) - 1, max_size=len(ends) - 1))]
    marks = [Breakpoint(at, "5m") for at in sorted(draw(st.sets(st.sampled_from(ends), max_size=4))) if at > 0]
    return ends, joined, marks


@given(contents(), st.integers(1, 6))
def test_candidates_are_so_many_positions_a_run_being_one(case, lookback):
    ends, joined, marks = case
    positions: list[list[int]] = []
    for end, same in zip(ends, joined, strict=True):
        if positions and end == positions[-1][-1]:
            continue
        if same and positions:
            positions[-1].append(end)
        else:
            positions.append([end])
    expected = set()
    for mark in marks:
        own = next(number for number, run in enumerate(positions) if mark.position in run)
        for run in positions[max(0, own - lookback + 1) : own + 1]:
            expected.update(end for end in run if 0 < end <= mark.position)
    assert list(read_candidates(ends, marks, lookback, joined)) == sorted(expected, reverse=True)


def test_20_positions_are_checked_the_breakpoint_s_own_being_the_first():
    reads = read_candidates(range(1, 41), [Breakpoint(40, "5m")])
    assert reads == tuple(range(40, 20, -1))


def test_a_round_of_25_parallel_calls_and_their_results_is_two_positions():
    """Question, 25 calls, 25 results, and the next text: the question is 4 positions away."""
    ends = range(1, 53)
    joined = [at in (*range(2, 26), *range(27, 51)) for at in range(52)]
    assert read_candidates(ends, [Breakpoint(52, "5m")], 4, joined)[-1] == 1
    assert read_candidates(ends, [Breakpoint(52, "5m")], 3, joined)[-1] == 2
    assert read_candidates(ends, [Breakpoint(52, "5m")])[-1] == 33


@st.composite
def rolling_conversations(draw):
    """An agent's conversation: of each turn the kinds of the blocks that it adds, and how many last messages carry
    marks.

    A message is a list of blocks; of calls and results there may be any number, of texts fewer than a lookback holds.
    """
    turns = []
    for _ in range(draw(st.integers(1, 8))):
        calls = draw(st.integers(0, 30))
        said = ["text"] * draw(st.integers(0 if calls else 1, 3)) + ["call"] * calls
        asked = ["result"] * calls + ["text"] * draw(st.integers(0 if calls else 1, 3))
        turns.append([said, asked])
    return [["text"] * draw(st.integers(1, 3))], turns, draw(st.integers(2, 3))


@given(rolling_conversations())
def test_rolling_breakpoints_never_lose_a_hit(case):
    """The last two or three messages carry the marks. Every turn reads up to the last mark of the turn before."""
    messages, turns, marked = case
    messages = list(messages)
    written: set[int] = set()
    last = 0
    for said_and_asked in [[], *turns]:
        messages += said_and_asked
        kinds = [kind for message in messages for kind in message]
        joined = [kind != "text" and kind == before for before, kind in itertools.pairwise(["", *kinds])]
        ends = [7 * (at + 1) for at in range(len(kinds))]
        closed = list(itertools.accumulate(map(len, messages)))[-marked:]
        marks = [Breakpoint(ends[blocks - 1], "5m") for blocks in closed]
        hit = max((at for at in read_candidates(ends, marks, joined=joined) if at in written), default=0)
        assert hit == last
        written |= {mark.position for mark in marks}
        last = marks[-1].position


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

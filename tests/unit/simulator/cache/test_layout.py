"""Prompts as runs of blocks, against an obvious pass over all blocks."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes.record import Candidate, Mark, RequestRecord
from warmkv.simulator.cache.layout import NONE, layout

A, B, C, D, E, TAIL = (bytes([n]) for n in range(1, 7))
SIZE = 4


def request(blocks, marks=(), reads=(), rest=0):
    return RequestRecord(
        id="", arrival=0.0, tenant="", model="", api="messages", policy="full", block_size=SIZE,
        input_tokens=len(blocks) * SIZE + rest, output_tokens=1, hashes=tuple(blocks), marks=marks, reads=reads,
    )  # fmt: skip


def lengths(found):
    return [[found.runs[run].blocks for run in prompt.runs] for prompt in found.prompts]


def test_a_run_ends_where_prompts_end_or_part():
    found = layout([request(blocks) for blocks in [(A, B, C), (A, B, C, D), (), (A, B, E)]])
    assert lengths(found) == [[2, 1], [2, 1, 1], [], [2, 1]]
    assert found.prompts[0].runs == found.prompts[1].runs[:2]
    assert [found.keys(run) for run in found.prompts[1].runs] == [(A, B), (C,), (D,)]


def test_a_run_ends_at_breakpoints_and_tails_hang_there():
    marks = (Mark(4, "1h", A), Mark(10, "5m", TAIL))
    reads = (Candidate(10, TAIL), Candidate(8, B), Candidate(4, A))
    found = layout([request((A, B, C), marks), request((A, B, C, D), (), reads)])
    assert lengths(found) == [[1, 1, 1], [1, 1, 1, 1]]
    first, second = found.prompts
    assert [write.runs for write in first.writes] == [1, 2]
    assert (first.writes[0].tail, found.keys(first.writes[1].tail)) == (NONE, (TAIL,))
    assert found.runs[first.writes[1].tail] == (first.runs[1], 1, 2)
    assert [(read.position, read.blocks, read.is_tail) for read in second.reads] == [(10, 2, True), (4, 1, False)]
    assert [read.number for read in second.reads] == [first.writes[1].tail, first.runs[0]]


def test_what_nobody_writes_is_not_looked_for():
    reads = (Candidate(8, B), Candidate(6, TAIL), Candidate(4, D))
    found = layout([request((A, B), (Mark(4, "5m", A),)), request((A, B), (), reads)])
    assert found.prompts[1].reads == ()


@st.composite
def trees(draw):
    """Prompts over a tree of blocks, or over one in which a block has come to stand behind two others."""
    parents, blocks = [None], [bytes([number]) for number in range(20)]
    parents += [draw(st.integers(0, number - 1)) for number in range(1, 20)]

    def path(at):
        return () if at is None else (*path(parents[at]), blocks[at])

    prompts = [path(at) for at in draw(st.lists(st.integers(0, 19), min_size=1, max_size=12))]
    if draw(st.booleans()):
        prompts.append(tuple(draw(st.lists(st.sampled_from(blocks), max_size=4))))
    return draw(st.permutations(prompts))


@given(trees())
def test_runs_are_laid_out_as_an_obvious_pass_over_all_prefixes_does(prompts):
    after = defaultdict(set)
    for prompt in prompts:
        for end, block in enumerate((*prompt, None)):
            after[prompt[:end]].add(block)
    found, chains = layout([request(prompt) for prompt in prompts]), set()
    for prompt, laid in zip(prompts, found.prompts, strict=True):
        ends = [n for n in range(1, len(prompt) + 1) if len(after[prompt[:n]]) > 1 or None in after[prompt[:n]]]
        assert [found.runs[run].blocks for run in laid.runs] == [end - start for start, end in pairwise([0, *ends])]
        assert [found.runs[run].parent for run in laid.runs] == [NONE, *laid.runs][: len(laid.runs)]
        assert tuple(block for run in laid.runs for block in found.keys(run)) == prompt
        chains |= {(run, prompt[:end]) for run, end in zip(laid.runs, ends, strict=True)}
    assert len(chains) == len({run for run, _ in chains}) == len({chain for _, chain in chains}) == len(found.runs)


@pytest.mark.parametrize("prompts", [[(A, B), (C, B)], [(A, B, A)], [(A, B), (B, C)]])
def test_blocks_behind_different_ones_are_different_prefixes(prompts):
    found = layout([request(prompt) for prompt in prompts])
    assert sum(run.blocks for run in found.runs) == len({p[:n] for p in prompts for n in range(1, len(p) + 1)})

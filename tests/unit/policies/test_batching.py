"""Forming batches: who gets tokens of a step, who is admitted, and how long anybody may wait."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from warmkv.policies.batching import (
    LONGEST_STEP,
    OLDEST_SHARE,
    PASSES,
    WaitingPrompt,
    admits_below,
    common_blocks,
    keys_per_token,
    next_prompt,
    split,
    waits_for,
    work_per_token,
)

BUDGETS = st.integers(1, 600)
LACKING = st.lists(st.integers(1, 2000), max_size=12)


@given(BUDGETS, LACKING)
def test_a_budget_is_used_up_or_everything_is_computed(budget, remaining):
    shares = split(budget, remaining)
    assert all(0 <= share <= lacking for share, lacking in zip(shares, remaining, strict=True))
    assert sum(shares) == min(budget, sum(remaining))


@given(BUDGETS, LACKING)
def test_the_oldest_has_its_share_and_the_shortest_the_rest(budget, remaining):
    shares = split(budget, remaining)
    if not remaining:
        return
    assert shares[0] >= min(remaining[0], budget // OLDEST_SHARE)
    whole = [share == lacking for share, lacking in zip(shares, remaining, strict=True)]
    for at, lacking in enumerate(remaining):
        if shares[at] and at:  # whoever gets something beside the oldest has no shorter one behind it
            assert all(whole[other] for other, shorter in enumerate(remaining) if other and shorter < lacking)


@given(BUDGETS, LACKING, st.integers(1, 2000))
def test_one_more_prompt_gets_tokens_if_it_is_shorter_than_that(budget, remaining, tokens):
    gets = split(budget, [*remaining, tokens])[-1] > 0
    assert gets == (tokens < admits_below(budget, remaining))


@given(BUDGETS, st.lists(st.integers(1, 2000), min_size=1, max_size=8), st.lists(st.integers(1, 50), max_size=400))
def test_a_long_prompt_ends_however_many_short_ones_come(budget, remaining, others):
    """It is the oldest when those before it have ended, each of which has its share of every step."""
    steps = sum(-(-lacking // max(1, budget // OLDEST_SHARE)) for lacking in remaining)
    prompts, left = list(remaining), len(remaining)  # of which `left` are those that were there
    for step in range(steps):
        shares = split(budget, prompts)
        prompts = [lacking - share for lacking, share in zip(prompts, shares, strict=True)]
        left -= sum(lacking == 0 for lacking in prompts[:left])
        prompts = [lacking for lacking in prompts if lacking] + others[step : step + 1]
    assert left == 0


@given(BUDGETS, st.lists(st.tuples(st.integers(1, 2000), st.floats(1, 50)), min_size=1, max_size=12))
def test_tokens_behind_long_contexts_count_for_more_and_fill_the_budget(budget, prompts):
    remaining, work = zip(*prompts, strict=True)
    shares = split(budget, remaining, work)
    assert all(0 <= share <= lacking for share, lacking in zip(shares, remaining, strict=True))
    assert shares[0] >= 1
    used = sum(share * each for share, each in zip(shares, work, strict=True))
    assert used <= max(budget, work[0]) * (1 + 1e-9)
    if shares != list(remaining):
        assert used > budget - max(work)


def test_a_token_counts_by_its_keys_while_somebody_decodes():
    assert work_per_token(8192, 1024, decoding=0) == 1
    assert work_per_token(1024, 1024, decoding=3) == 1
    assert work_per_token(7168, 1024, decoding=3) == 4
    assert split(1024, [820], [work_per_token(7168, 1024, decoding=1)]) == [256]
    assert keys_per_token(8e9, 32, 32, 128) == 30_517.578125  # an 8B model


@given(st.integers(0, 1 << 20), st.floats(1, 1e5), BUDGETS)
def test_no_step_takes_longer_than_decoding_sequences_wait(context, keys, budget):
    """A token takes one unit, and one for `keys` keys that it attends to."""
    work = work_per_token(context, keys, decoding=1)
    tokens = split(budget, [1 << 20], [work])[0]
    assert tokens == 1 or tokens * (1 + context / keys) <= LONGEST_STEP * budget * (1 + 1e-9)
    assert work == 1 or (tokens + 1) * work > budget  # and none is shorter than it must be


def test_a_short_prompt_takes_the_tokens_of_a_long_one():
    assert split(512, [8000]) == [512]
    assert split(512, [8000, 100]) == [412, 100]
    assert split(512, [8000, 1000, 100]) == [128, 284, 100]
    assert split(512, [400, 400, 400]) == [400, 112, 0]


@dataclass(eq=False)
class Waiting:
    name: str
    passed: int = 0


def test_who_does_not_fit_is_passed_a_bounded_number_of_times():
    large, admitted = Waiting("large"), 0
    while (
        found := next_prompt([large, Waiting("small")], lambda each: each is not large, lambda each: False)
    ) is not None:
        assert found is not large
        admitted += 1
    assert admitted == large.passed == PASSES
    assert next_prompt([large, Waiting("small")], lambda each: True, lambda each: False) is large


def test_who_waits_for_a_prefix_in_progress_is_passed_by_anybody():
    waits, other = Waiting("waits", passed=PASSES), Waiting("other")
    assert next_prompt([waits, other], lambda each: True, lambda each: each is waits) is other
    assert waits.passed == PASSES


def test_only_the_first_of_a_long_queue_are_considered():
    seen = []
    queue = [Waiting(str(number)) for number in range(10 * PASSES)]
    assert next_prompt(queue, lambda each: bool(seen.append(each)), lambda each: False) is None
    assert seen == queue[:PASSES]


@given(BUDGETS, LACKING)
def test_tokens_that_count_once_are_divided_alike_however_that_is_said(budget, remaining):
    assert split(budget, remaining) == split(budget, remaining, [1.0] * len(remaining))
    assert admits_below(budget, remaining) == admits_below(budget, remaining, [1.0] * len(remaining))


def test_prompts_share_the_blocks_before_the_first_that_differs():
    mine = [b"a", b"b", b"c"]
    assert common_blocks(mine, mine) == 3
    assert common_blocks(mine, [b"a", b"b", b"x", b"y"]) == 2
    assert common_blocks(mine, [b"x", b"y", b"z"]) == common_blocks([], mine) == 0


def test_a_prompt_waits_only_for_what_it_can_reuse():
    prompt = WaitingPrompt(tokens=40, resident=2, reusable=39)
    assert waits_for(prompt, 10, common=3, size=8)
    assert not waits_for(prompt, 10, common=2, size=8)  # that is warm
    assert not waits_for(prompt._replace(reusable=16), 10, common=3, size=8)
    assert waits_for(prompt, 10, common=3, size=8, sums=[24, 40])
    assert not waits_for(prompt, 10, common=3, size=8, sums=[32])
    assert not waits_for(prompt, 10, common=3, size=8, sums=[])


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 1000))
def test_a_prompt_waits_where_both_end_no_later_in_sum(own, shared, warm, lacking):
    shared = min(shared, own)
    waiting = lacking + (lacking + own - shared)
    apart = min(own, lacking) + (own + lacking)  # the shorter goes first
    prompt = WaitingPrompt(warm + own, warm, warm + own)
    assert waits_for(prompt, lacking, warm + shared, 1) == (shared > 0 and waiting <= apart)

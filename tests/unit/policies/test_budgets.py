from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.policies.budgets import (
    in_force,
    kept_tokens,
    needs_column_sums,
    read_limit,
    recomputed_tokens,
    resolve_auto,
    resolve_budget,
    segment_tokens,
    slot_capacity,
)
from warmkv.policies.compression.methods.auto import column_sums_share
from warmkv.policies.compression.methods.pyramidkv import pyramid
from warmkv.policies.slot_sizes import KVShape, slot_bytes
from warmkv.policy_spec import PolicySpec

PROMPTS = st.integers(1, 200_000)
NEW = st.integers(0, 5_000)
SHARES = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)


@st.composite
def specs(draw):
    name = draw(st.sampled_from(["full", "snapkv", "streaming_llm"]))
    if name == "full":
        return PolicySpec()
    budget = draw(st.one_of(SHARES, st.integers(5, 5000)))
    return PolicySpec(name=name, budget=budget, **({"window": draw(st.integers(1, 64))} if name == "snapkv" else {}))


@given(SHARES, PROMPTS)
def test_a_share_is_rounded_up_and_exact_in_decimals(share, prompt):
    exact = -(-Fraction(round(share * 1000), 1000) * prompt // 1)
    assert resolve_budget(PolicySpec(name="snapkv", budget=share), prompt) == max(1, exact)


def test_a_share_that_floats_cannot_hold_keeps_no_token_more():
    assert 0.07 * 100 > 7
    assert resolve_budget(PolicySpec(name="snapkv", budget=0.07), 100) == 7


@given(specs(), PROMPTS)
def test_kept_is_within_prompt_and_budget(spec, prompt):
    kept, budget = kept_tokens(spec, prompt), resolve_budget(spec, prompt)
    assert 1 <= kept <= prompt
    assert (budget is None) == (spec.name == "full")
    if budget is None or prompt <= budget:
        assert kept == prompt
    else:
        assert kept == budget


@given(specs(), PROMPTS, NEW)
def test_a_slot_is_never_outgrown(spec, prompt, new):
    """Walk through decoding: one more entry for every new token but the last, or an overwritten one in a full ring."""
    entries, ring = kept_tokens(spec, prompt), resolve_budget(spec, prompt) if spec.name == "streaming_llm" else None
    entries += max(0, new - 1)
    if ring is not None:
        entries = min(entries, ring)
    assert slot_capacity(spec, prompt, new) == entries


@given(specs(), PROMPTS, NEW)
def test_more_prompt_or_more_answer_never_needs_less(spec, prompt, new):
    capacity = slot_capacity(spec, prompt, new)
    assert capacity <= slot_capacity(spec, prompt, new + 1)
    assert capacity <= slot_capacity(spec, prompt + 1, new)
    assert capacity <= slot_capacity(PolicySpec(), prompt, new)


@given(specs(), PROMPTS)
def test_something_is_always_computed(spec, prompt):
    again = recomputed_tokens(spec, prompt)
    assert 1 <= again <= prompt
    votes = (
        spec.window is not None and spec.window < kept_tokens(spec, prompt) < prompt
    )  # else nothing is evicted, or only the window is kept
    assert again == (spec.window if spec.name == "snapkv" and votes else 1)


def test_a_streaming_share_keeps_the_sinks_and_one_recent_token():
    spec = PolicySpec(name="streaming_llm", budget=0.001, sinks=4)
    assert kept_tokens(spec, 1000) == 5
    assert kept_tokens(spec, 3) == 3


@pytest.mark.parametrize(("shape", "size"), [(KVShape(32, 8, 128, 2), 131_072), (KVShape(6, 2, 32, 4), 3072)])
def test_bytes_of_a_token(shape, size):
    assert shape.token_bytes == size


ALL_KINDS = [
    *("full", "fp8", "kivi", "auto", "snapkv@0.2", "snapkv@512+ring", "snapkv@0.3+kivi4", "streaming_llm@300+kivi2"),
    *(
        "h2o@0.3",
        "tova@200",
        "pyramidkv@0.2",
        "pyramidkv@0.2+kivi2",
        "rocketkv@0.1",
        "adakv@0.2",
        "fastgen",
        "adaptive",
    ),
]


@given(st.sampled_from(ALL_KINDS), st.lists(st.tuples(PROMPTS, NEW), min_size=2, max_size=12))
def test_sizes_that_were_found_before_change_none(policy, requests):
    policy, shape, rows = PolicySpec.model_validate(policy), KVShape(8, 2, 32, 2), {}
    for prompt, new in requests:
        spec = in_force(policy, prompt, new)
        kept = rows.setdefault(id(spec), {})
        assert slot_bytes(spec, shape, prompt, new, kept) == slot_bytes(spec, shape, prompt, new)


TASKS = st.sampled_from(["general", "reasoning", "few_shot"])


@given(PROMPTS, TASKS, st.sampled_from([0.0, 0.25, 1.0, 2.0, 100.0]))
def test_auto_chooses_column_sums_only_where_they_are_affordable(prompt, task, scoring):
    spec = PolicySpec(name="auto", task=task, scoring=scoring)
    chosen = resolve_auto(spec, prompt)
    assert not needs_column_sums(chosen, prompt) or column_sums_share(prompt) <= scoring
    assert chosen.name in ("full", "snapkv", "h2o")
    assert (chosen.name == "full") == (prompt < 8192)
    if chosen.name != "full":
        assert (chosen.protect, chosen.shots) == (0.1, task == "few_shot")
        assert kept_tokens(spec, prompt) >= (0.3 if task == "reasoning" else 0.1) * prompt


@given(PROMPTS, TASKS)
def test_by_default_auto_never_waits_for_column_sums(prompt, task):
    """They take longer than the rest of prefill at every length that auto compresses."""
    assert not needs_column_sums(PolicySpec(name="auto", task=task), prompt)


def test_what_column_sums_add_grows_with_the_prompt_and_shrinks_with_the_model():
    assert column_sums_share(8_192) == pytest.approx(1.2, rel=0.05)
    assert column_sums_share(32_768) == pytest.approx(3.4, rel=0.05)
    assert column_sums_share(8_192, hidden=16_384) > 0.25  # no model is wide enough


@pytest.mark.parametrize(("prompt", "name"), [(8_191, "full"), (8_192, "h2o"), (32_768, "h2o"), (32_769, "snapkv")])
def test_auto_takes_h2o_where_it_may_take_that_long(prompt, name):
    assert resolve_auto(PolicySpec.model_validate("auto:scoring=4"), prompt).name == name


@pytest.mark.parametrize(
    ("budget", "prompt", "expected"),
    [
        (64 + 32, 127, [96] * 4),  # less than twice the budget beside the window: flat
        (64 + 32, 128, [127, 106, 85, 64]),
        (64 + 32, 1000, [156, 116, 76, 36]),
    ],
)
def test_the_pyramid_is_flat_for_short_prompts(budget, prompt, expected):
    assert pyramid(budget, window=32, tokens=prompt, layers=4, beta=20) == expected


@pytest.mark.parametrize(
    ("budget", "tokens", "kept", "segment", "reads", "channels"),
    [
        (3200, 32_000, 12_759, 2, 1600, 64),  # cr 10, alpha 0.3993; cr2 3.987, 128 * 2 / 3.987
        (256, 131_072, 1296, 3, 128, 75),  # cr 512, alpha 0.74; cr2 5.06, 128 * 3 / 5.06
        (40, 60, 54, 1, 20, 94),  # cr2 1.35: segments of 2 would be more than it, and 128 / 1.35
    ],
)
def test_rocketkv_splits_what_it_reads_between_choosing_and_attending(budget, tokens, kept, segment, reads, channels):
    """Sections 3.3 and 3.4 of arXiv 2502.14051: both stages compress alike, and so do both steps of the second."""
    spec = PolicySpec(name="rocketkv", budget=budget)
    assert kept_tokens(spec, tokens) == kept
    assert segment_tokens(spec, tokens) == segment
    assert read_limit(spec, tokens, 128) == (reads, channels)
    assert channels * -(-kept // segment) == pytest.approx(reads * 2 * 128, rel=0.05)  # numbers read by either step

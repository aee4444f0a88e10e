"""Budgets in bytes: never above the share, and the next token would be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.evaluation import matching
from warmkv.evaluation.plan import read_policy
from warmkv.policies import budgets
from warmkv.policies.slot_sizes import KVShape, slot_bytes
from warmkv.policy_spec import METHODS, PolicySpec

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=32, dtype_bytes=2)
ENTRY = 2 * 32 * 2  # key and value of a KV head in bfloat16
POLICIES = [
    *(name for name, method in METHODS.items() if method.has_budget),
    "h2o+append", "snapkv+ring", "snapkv+argmin", "snapkv+kivi4", "window+kivi2", "h2o+kivi4", "streaming_llm+kivi4",
    "snapkv+fp8", "tova+turbo3", "pyramidkv+turbo4",
]  # fmt: skip


@given(
    method=st.sampled_from(POLICIES),
    kv_heads=st.sampled_from([1, 2, 8]),
    windows=st.sampled_from([(), (64, 0, 64), (512, 512, 0), (40, 700, 700)]),
    prompt=st.integers(2, 5000),
    new=st.integers(1, 300),
    share=st.floats(0.01, 1.0),
)
def test_the_largest_budget_within_the_share(method, kv_heads, windows, prompt, new, share):
    shape, spec = KVShape(3, kv_heads, 32, 2, windows=windows), read_policy(method)
    allowed = matching.allowed_bytes(shape, prompt, new, share)
    found = matching.match(spec, shape, prompt, new, allowed)
    if found is None:
        least = matching.with_budget(spec, matching.smallest_budget(spec))
        assert matching.planned_bytes(least, shape, prompt, new) > allowed
        return
    assert matching.planned_bytes(found, shape, prompt, new) <= allowed <= matching.full_bytes(shape, prompt, new)
    if found.budget < prompt + new - 1:
        assert matching.planned_bytes(matching.with_budget(found, found.budget + 1), shape, prompt, new) > allowed
    PolicySpec.model_validate(found.model_dump())  # a budget that the policy takes


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("full", 6 * 109 * ENTRY),
        ("window@40", 6 * 40 * ENTRY),
        ("streaming_llm@40", 6 * (40 * ENTRY + 4 * ENTRY // 2)),  # the sinks' keys twice
        ("h2o@40", 6 * 40 * (ENTRY + 8)),  # a score and an age each
        ("snapkv@40", 6 * (40 + 9) * ENTRY),  # new tokens are appended
        ("snapkv@40+fp8", 6 * 49 * ENTRY // 2),
        # 109 entries: 32 recent ones, 77 in three groups of 32 at 4 bits, with two halves for 32 numbers each way
        ("full+kivi4", 6 * (32 * ENTRY + 96 * (64 // 2 + 4 + 4))),
    ],
)
def test_bytes_counted_by_hand(policy, expected):
    assert matching.planned_bytes(PolicySpec.model_validate(policy), SHAPE, 100, 10) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("full", 2 * (2 * 64 + 109) * ENTRY),  # two layers are rings of their window
        ("window@40", 6 * 40 * ENTRY),
        ("window@80", 2 * (2 * 64 + 80) * ENTRY),
        ("h2o@40", 6 * 40 * (ENTRY + 8)),
        ("h2o@80", 2 * (2 * 64 * ENTRY + 80 * (ENTRY + 8))),  # a ring needs no scores
        ("snapkv@40", 2 * (2 * 49 * (ENTRY + 4) + 49 * ENTRY)),  # ages tell what has left the window
        ("snapkv@80", 2 * (2 * 64 + 89) * ENTRY),
    ],
)
def test_layers_with_a_window_count_what_it_leaves(policy, expected):
    shape = replace(SHAPE, windows=(64, 0, 64))
    assert matching.planned_bytes(PolicySpec.model_validate(policy), shape, 100, 10) == expected


@pytest.mark.parametrize("method", ["window", "streaming_llm", "h2o", "tova", "snapkv", "adakv"])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_share_is_used_up_where_layers_have_windows(method, share):
    shape = KVShape(6, 2, 128, 2, windows=(512,) * 5 + (0,))
    full, allowed = matching.full_bytes(shape, 3072, 8), matching.allowed_bytes(shape, 3072, 8, share)
    assert full == 2 * (5 * 512 + 3079) * 2 * 128 * 2
    found = matching.match(read_policy(method), shape, 3072, 8, allowed)
    assert 0.95 * allowed < matching.planned_bytes(found, shape, 3072, 8) <= allowed


@pytest.mark.parametrize("windows", [(), (64, 0, 100)])
@pytest.mark.parametrize("method", POLICIES)
def test_a_slot_takes_that_and_the_rounding_to_its_size_class(method, windows):
    spec, shape = matching.with_budget(read_policy(method), 150), replace(SHAPE, windows=windows)
    exact, real = matching.planned_bytes(spec, shape, 600, 20), slot_bytes(spec, shape, 600, 20)
    assert exact <= real
    if not budgets.follows_content(spec, 600):
        assert real <= 1.35 * exact


def test_at_the_whole_share_nothing_is_given_up():
    spec = matching.match(read_policy("h2o"), SHAPE, 500, 8, matching.full_bytes(SHAPE, 500, 8))
    assert budgets.in_force(spec, 500, 8) == PolicySpec()


def test_packed_entries_cannot_get_below_their_tail():
    allowed = matching.allowed_bytes(SHAPE, 512, 64, 0.1)
    assert matching.match(read_policy("snapkv"), SHAPE, 512, 64, allowed) is None
    assert matching.match(read_policy("window"), SHAPE, 512, 64, allowed).budget == 57


@given(st.sets(st.integers(0, 40)), st.integers(0, 20), st.integers(0, 20))
def test_bisection_finds_one_that_fits_before_one_that_does_not(fitting, low, more):
    found = matching.largest(fitting.__contains__, low, low + more)
    if found is None:
        assert low not in fitting
    else:
        assert found in fitting
        assert found == low + more or found + 1 not in fitting

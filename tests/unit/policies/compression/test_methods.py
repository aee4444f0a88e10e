"""What each method keeps, against slow definitions written from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.replicas import slow_methods
from warmkv.policies import budgets
from warmkv.policies.compression import build, selection
from warmkv.policies.compression.methods.adakv import safeguarded
from warmkv.policies.compression.prefill_state import PrefillState, TokenClasses
from warmkv.policies.compression.shotkv import best_units
from warmkv.policies.compression.softmax import Softmax
from warmkv.policy_spec import METHODS, PolicySpec

LAYERS, HEAD_DIM = 3, 8
INV_FREQ = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
SPECS = [
    *slow_methods.cases("KEPT"),
    "snapkv@20+protect:window=4",
    "h2o@20+protect",
    "knorm@0.3:protect=0.3",
    "adakv@20+protect:window=4",
    "cake@20+protect:window=4",
    "pyramidkv@20+protect:window=4",
    "snapkv@16+shots:window=4",
    "h2o@20+protect+shots",
    "keydiff@0.4+shots",
    "rocketkv@9+protect:window=3,kernel=3",
    "snapkv@12+ring:window=4",
    "knorm@10+argmin",
    "tova@0.3+protect",
    "tova@16+ring",
    "expected_attention@20+protect:window=16",
]


def computed(
    seed: int, tokens: int, kv_heads: int, group: int, spec: PolicySpec, chunk: int
) -> tuple[PrefillState, Any, Any]:
    """Return a prompt of random queries, keys and values, the same for the slow definitions, and its token classes."""
    random = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(LAYERS, heads, tokens, HEAD_DIM, generator=random) * 1.5

    queries, keys, values = draw(kv_heads * group), draw(kv_heads), draw(kv_heads)
    ids = torch.randint(0, 20, (tokens,), generator=random).tolist()
    vocabulary = torch.arange(20)
    classes = TokenClasses(vocabulary < 1, (vocabulary > 0) & (vocabulary < 4), vocabulary == 5)
    prompt = PrefillState(
        torch.empty_like(keys),
        torch.empty_like(values),
        q_heads=kv_heads * group,
        observed=min(tokens, budgets.observed_queries(spec, tokens)),
        column_sums=budgets.needs_column_sums(spec, tokens),
        inv_freq=INV_FREQ,
        token_ids=ids,
        classes=classes,
    )
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        prompt.begin_chunk(part.stop - part.start)
        for layer in range(LAYERS):
            prompt.attend(layer, *(x[layer, None, :, part] for x in (queries, keys, values)), Softmax(HEAD_DIM**-0.5))
        prompt.end_chunk()
    views = [slow_methods.LayerView(*parts) for parts in zip(queries, keys, values, strict=True)]
    members = {
        kind: {at for at, token in enumerate(ids) if getattr(classes, kind)[token]}
        for kind in ("special", "punctuation", "separators")
    }
    return prompt, views, members


def positions(selections: Any) -> list[list[list[int]]]:
    return [[[p for p in head if p >= 0] for head in selection.positions.tolist()] for selection in selections]


def test_every_method_has_a_slow_definition():
    assert set(slow_methods.NAMES) == {name for name, method in METHODS.items() if not method.delegates}
    assert all(slow_methods.definition(name).KEPT for name in slow_methods.NAMES)


@pytest.mark.parametrize("text", SPECS)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 60),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (1, 4)]),
    chunk=st.sampled_from([7, 64]),
)
def test_kept_positions_equal_the_slow_definition(text, seed, tokens, heads, chunk):
    spec = PolicySpec.model_validate(text)
    assume(spec.name != "keydiff" or tokens != 2)  # two keys are equally unlike their mean: rounding would decide
    prompt, views, members = computed(seed, tokens, *heads, spec, chunk)
    expected = slow_methods.kept(spec, views, inv_freq=INV_FREQ, **members)
    got = positions(build(spec).select(prompt))
    assert got == expected


@pytest.mark.parametrize("text", SPECS)
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 200))
def test_budgets_hold(text, seed, tokens):
    spec = PolicySpec.model_validate(text)
    prompt, _, _ = computed(seed, tokens, 2, 2, spec, 256)
    counts = [[len(head) for head in layer] for layer in positions(build(spec).select(prompt))]
    total, allowed = sum(map(sum, counts)), 2 * LAYERS * budgets.kept_tokens(spec, tokens)
    assert total <= allowed
    if spec.name not in ("fastgen", "adaptive", "pyramidkv"):  # which may keep less
        assert total == allowed
    if not budgets.follows_content(spec, tokens):
        assert counts == [[kept, kept] for kept in budgets.layer_budgets(spec, tokens, LAYERS)]
    if not budgets.is_compressed(spec, tokens):
        assert counts == [[tokens, tokens]] * LAYERS


class Sorts(TorchDispatchMode):
    """Count what is sorted."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator.name().startswith("aten::sort")
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("snapkv@20:window=4", 1),
        ("h2o@20", 1),
        ("pyramidkv@20:window=4", LAYERS),  # whose layers keep each as many as it does
        ("snapkv@20+shots:window=4", LAYERS),  # shots are chosen by all heads of a layer together
        ("adakv@20:window=4", LAYERS),
    ],
)
def test_layers_that_choose_alike_choose_together(text: str, rounds: int) -> None:
    prompt, _, _ = computed(0, 60, 2, 2, PolicySpec.model_validate(text), 64)
    counts = []
    for most in (1 << 22, 0):  # scores that may be sorted at once
        with Sorts() as sorts, pytest.MonkeyPatch.context() as patch:
            patch.setattr(selection, "LOGITS_AT_ONCE", most)
            build(PolicySpec.model_validate(text)).select(prompt)
        counts.append(sorts.count)
    together, apart = counts
    assert together * LAYERS == apart * rounds > 0


@settings(max_examples=100)
@given(st.data(), st.integers(1, 8), st.integers(0, 40), st.integers(0, 100).map(lambda percent: percent / 100))
def test_adakv_rounds_what_is_published_and_keeps_the_layers_total(data, heads, even, floor):
    cuts = sorted(data.draw(st.lists(st.integers(0, heads * even), min_size=heads - 1, max_size=heads - 1)))
    greedy = [b - a for a, b in zip([0, *cuts], [*cuts, heads * even], strict=True)]
    counts = safeguarded(greedy, even, floor)
    assert sum(counts) == heads * even
    assert all(abs(count - (1 - floor) * own - floor * even) < 1 for own, count in zip(greedy, counts, strict=True))


def test_adakv_draws_every_head_towards_an_even_share():
    assert safeguarded([20, 0], 10, 0.2) == [18, 2]
    assert safeguarded([14, 6], 10, 0.2) == [13, 7]  # a floor alone would leave it at 14 and 6


def test_all_heads_of_a_layer_keep_the_shots_that_they_like_best_together():
    """Equation 3 sums over the heads of a layer: on its own, the second head would keep the other shot."""
    first, second = [0.9, 0.5, 0.5, 0.3, 0.2], [0.1, 0.0, 0.2, 0.4, 0.3]
    last_of_a_shot = torch.tensor([False, True, False, False, True])
    kept = best_units(torch.tensor([first, second]), 3, last_of_a_shot)
    assert kept.tolist() == [[0, 1, 2], [0, 1, 3]]  # (1.4 + 0.1) / 2 against (1.0 + 0.9) / 3, and a token of its own
    assert best_units(torch.tensor([second]), 3, last_of_a_shot).tolist() == [[2, 3, 4]]

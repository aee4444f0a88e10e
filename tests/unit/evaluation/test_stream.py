"""Perplexity along a stream, beyond the model's range and against slow computations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.evaluation.conftest import CONTEXT
from tests.unit.replicas.slots.test_sliding import sliding_model
from warmkv.evaluation import stream
from warmkv.evaluation.plan import bounded, read_policy
from warmkv.evaluation.results import RECOMPUTED
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.slots.slots import SlotPool


def test_a_seed_gives_the_same_stream(texts):
    ids = stream.tokens(texts, 5, 3000)
    assert len(ids) == 3000
    assert ids == stream.tokens(texts, 5, 3000)
    assert ids[:100] == stream.tokens(texts, 5, 2000)[:100]
    assert ids != stream.tokens(texts, 6, 3000)


def test_the_recomputed_window_is_what_transformers_computes(model, reference, texts):
    ids = stream.tokens(texts, 0, 150)
    losses = stream.recomputed(model, ids, cache=32)
    assert len(losses) == 150 - 32
    for at, token in enumerate(ids[32:]):
        context = 32 - (3 - at % 4 if at < 116 else 1 - at % 4)  # the last of every four sees 32 tokens
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([ids[32 + at - context : 32 + at]])).logits[0, -1]
        assert float(losses[at]) == pytest.approx(float(-logits.log_softmax(-1)[token]), rel=1e-3)


def test_the_recomputed_window_knows_the_models_own_windows():
    """Layers with a sliding window attend to it alone, however long the recomputed one is."""
    plain, ids = sliding_model(12), [(7 * at) % 97 for at in range(60)]
    losses = stream.recomputed(prepare(sliding_model(12)), ids, cache=32)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([ids[3:35]])).logits[0, -1]
    assert float(losses[3]) == pytest.approx(float(-logits.log_softmax(-1)[ids[35]]), rel=1e-4)


def test_a_stream_has_the_bytes_that_windows_leave():
    model, ids = prepare(sliding_model(12)), [(7 * at) % 97 for at in range(200)]
    rows = stream.evaluate(model, ids, bounded({}), 0, lambda n: None)
    cache, of_layer = rows[0]["cache_tokens"], model.kv_shape.token_bytes // 3
    assert {row["bytes"] for row in rows if row["policy"] != "streaming_llm"} == {(2 * 12 + cache) * of_layer}


def test_a_stream_goes_on_beyond_the_models_range(model, texts):
    model = replace(model, max_context=CONTEXT // 2)
    count = model.max_context + 300
    ids = stream.tokens(texts, 0, count)
    specs = bounded({"h2o": read_policy("h2o"), "snapkv": read_policy("snapkv")})
    assert list(specs) == ["window", "streaming_llm", "h2o"]
    told: list[int] = []
    rows = stream.evaluate(model, ids, specs, 0, told.append)
    assert sum(told) == count
    # A larger range changes nothing: only distances matter to rotary attention.
    far = stream.evaluate(replace(model, max_context=100_000), ids, specs, 0, told.append)
    assert [row["policy"] for row in rows[:: stream.SEGMENTS]] == [RECOMPUTED, "window", "streaming_llm", "h2o"]
    cache = rows[0]["cache_tokens"]
    assert far[0]["cache_tokens"] == min(512, count // 4)
    for policy in (RECOMPUTED, *specs):
        of = [row for row in rows if row["policy"] == policy]
        assert sum(row["tokens"] for row in of) == count - cache
        assert of[0]["start"] == cache
        assert all(row["bytes"] <= cache * model.kv_shape.token_bytes for row in of)


def test_turning_a_cache_back_changes_nothing(model, texts, monkeypatch):
    shifts: list[int] = []
    rebase = SlotPool.rebase

    def watched(pool, slot, most, inv_freq):
        rebase(pool, slot, most, inv_freq)
        shifts.append(slot.shift)

    monkeypatch.setattr(SlotPool, "rebase", watched)
    ids = stream.tokens(texts, 0, 600)
    specs = bounded({"h2o": read_policy("h2o"), "snapkv+ring": read_policy("snapkv+ring")})

    def losses(max_context):
        found, _ = stream._decoded(
            replace(model, max_context=max_context), ids[:100], ids[100:], matched, 1 << 30, lambda n: None, None
        )
        return found

    matched = {label: stream._matched(model, spec, 100, 500, 20_000) for label, spec in specs.items()}
    often = losses(200)
    assert max(shifts) > 300
    never = losses(100_000)
    assert shifts[-1] == 0
    for label in matched:
        torch.testing.assert_close(often[label], never[label], rtol=2e-3, atol=2e-3)


def test_what_cannot_be_turned_back_is_left_out(model, texts):
    ids = stream.tokens(texts, 0, 512)
    specs = bounded({"snapkv+ring+kivi4": read_policy("snapkv+ring+kivi4")})
    rows = stream.evaluate(model, ids, specs, 0, lambda n: None)
    assert {row["policy"] for row in rows} == {RECOMPUTED, "window", "streaming_llm"}

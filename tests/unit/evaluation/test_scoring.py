"""Forced answers: the full cache scores as transformers does, and every policy as the engine decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request
from tests.unit.replicas.slots.test_sliding import sliding_model
from warmkv.evaluation import forcing, matching, tasks
from warmkv.evaluation.plan import read_policy
from warmkv.evaluation.scoring import score
from warmkv.evaluation.tasks import Sample
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.slots.slots import SlotPool

POLICIES = ("full", "window", "streaming_llm", "h2o", "snapkv", "pyramidkv", "adakv+turbo4", "full+kivi4", "fastgen")


def specs(*policies):
    return {policy: read_policy(policy) for policy in policies}


def drawn(texts, name="needle", length=300):
    return tasks.draw(tasks.TASKS[name], texts, seed=3, length=length, depth=0.5, form="plain", index=0)


@pytest.mark.parametrize("name", ["needle", "scratch", "code"])
def test_the_full_cache_scores_as_transformers_does(model, reference, texts, name):
    sample = drawn(texts, name)
    (row,) = score(specs("full"), (), model, sample, by_token=True)
    ids = torch.tensor([[*sample.prompt, *sample.forced]])
    with torch.no_grad():
        logits = reference(input_ids=ids).logits[0, -sample.answer - 1 : -1]
    answer = ids[0, -sample.answer :]
    loss = torch.nn.functional.cross_entropy(logits, answer)
    assert row["nll"] == pytest.approx(float(loss), rel=1e-4)
    assert row["accuracy"] == row["score"] == pytest.approx(float((logits.argmax(-1) == answer).double().mean()))
    assert row["bytes"] == row["handoff_bytes"] + (len(sample.forced) - 1) * model.kv_shape.token_bytes
    assert row["kept_tokens"] == len(sample.prompt)


def test_a_policy_scores_the_same_alone_and_among_others(model, texts):
    sample = drawn(texts, "scratch")
    together = score(specs(*POLICIES), (1.0, 0.4), model, sample, by_token=True)
    for row in together:
        alone = score(specs(row["policy"]), (row["share"] or 1.0,), model, sample, by_token=True)
        (same,) = [other for other in alone if other["share"] == row["share"]]
        assert same == {**row, "nll": pytest.approx(row["nll"], rel=1e-4)}


@pytest.mark.parametrize("policy", ["snapkv@60", "h2o@60", "streaming_llm@60", "window@60+kivi4", "adakv@60"])
def test_what_the_engine_decodes_is_right_when_forced(model, texts, policy):
    spec, prompt = PolicySpec.model_validate(policy), list(drawn(texts).prompt[:200])
    (decoded,) = Driver(model).run(make_request(prompt, new=40, policy=spec, ignore_eos=True))
    computed, logits = forcing.prefill(model, prompt, [spec])
    pool = SlotPool(model.kv_shape, model.dtype, model.device)
    filled = forcing.fill(model, pool, computed, spec, len(decoded), None)
    hits, losses = forcing.force(model, pool, [filled.slot], logits, decoded)
    assert hits.all()
    assert losses.shape == (1, 40)


@pytest.mark.parametrize("window", [0, 96])
def test_bytes_stay_within_the_share_and_within_the_slot(model, texts, window):
    sample = drawn(texts, "code")
    if window:
        model = prepare(sliding_model(window))
        prompt, forced = (tuple(token % VOCABULARY for token in of) for of in (sample.prompt, sample.forced))
        sample = replace(sample, prompt=prompt, forced=forced)
    full = matching.full_bytes(model.kv_shape, len(sample.prompt), len(sample.forced))
    rows = score(specs(*POLICIES, "adakv+kivi4", "cake", "adaptive"), (1.0, 0.6, 0.3), model, sample, by_token=True)
    assert rows[0]["bytes"] == full
    reached = {1.0, 0.6} if window else {1.0, 0.6, 0.3}  # the answer alone fills most of a window
    assert {row["share"] for row in rows if row["policy"] == "cake"} == reached
    for row in rows:
        assert row["share"] is None or row["bytes"] <= row["share"] * full
        assert row["handoff_bytes"] <= row["bytes"] <= row["slot_bytes"]


def test_where_heads_differ_the_budget_is_lowered_until_the_bytes_fit(model, texts):
    spec, prompt = PolicySpec.model_validate("adakv@200+kivi4"), list(drawn(texts).prompt)
    computed, _ = forcing.prefill(model, prompt, [spec])
    pool = SlotPool(model.kv_shape, model.dtype, model.device)
    free = forcing.fill(model, pool, computed, spec, 4, None)
    less = forcing.fill(model, pool, computed, spec, 4, free.bytes - 1)
    assert less.bytes < free.bytes
    assert less.spec.budget < 200
    assert forcing.fill(model, pool, computed, spec, 4, 100) is None


def test_a_whole_answer_counts_only_if_every_token_is_right(model, reference, texts):
    prompt = drawn(texts).prompt
    with torch.no_grad():
        likely = reference.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[
            0, len(prompt) :
        ].tolist()
    wrong = [*likely[:3], (likely[3] + 1) % 2048]
    for answer, right, accuracy in ((likely, True, 1.0), (wrong, False, 0.75)):
        sample = Sample(prompt[:-9], (*prompt[-9:], *answer), 4, None)  # nine tokens are forced and not scored
        (row,) = score(specs("full"), (), model, sample, by_token=False)
        assert (row["right"], row["score"], row["accuracy"]) == (right, float(right), accuracy)

"""A run from end to end: what it stores, that it can be continued, and that a seed decides it."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from warmkv.evaluation import run, summary
from warmkv.evaluation.plan import EvalError, bounded
from warmkv.evaluation.results import SCHEMA, RunFolder


def evaluate(plan, model, tokenizer, path, stop_after=None):
    """Run into a folder, or be interrupted after some reports of progress."""
    folder, told = RunFolder(path, run.meta_of(plan, model)), []

    def progress(what, work):
        told.append((what, work))
        if stop_after is not None and len(told) > stop_after:
            raise KeyboardInterrupt

    run.evaluate(plan, model, tokenizer, folder, progress)
    assert sum(work for _, work in told) == run.work(plan, tokenizer)
    return folder


@pytest.fixture(scope="module")
def done(small, model, tokenizer, tmp_path_factory):
    return evaluate(small, model, tokenizer, tmp_path_factory.mktemp("run") / "whole")


def test_there_is_a_row_for_every_sample_policy_and_share(small, done):
    rows = done.rows()
    assert pq.read_schema(done.path / "results.parquet").equals(SCHEMA)
    samples = {(r["task"], r["variant"], r["length"], r["depth"], r["sample"]) for r in rows}
    assert len(samples) == 2 * 2 + 2 * 2 + 2  # needle at two depths, scratch in two places, code; two lengths
    assert {r["variant"] for r in rows if r["task"] == "needle"} == {"chat"}
    for policy in ("window", "h2o"):
        assert sum(r["policy"] == policy and r["share"] == 0.5 for r in rows) == len(samples)
    for policy in ("full", "full+kivi4"):
        assert [r["share"] for r in rows if r["policy"] == policy] == [None] * len(samples)
    for row in rows:
        assert row["share"] is None or row["bytes"] <= row["share"] * row["full_bytes"]
        assert row["seed"] == small.seed


def test_what_appends_64_tokens_cannot_stay_at_a_tenth(done):
    reached = {(r["task"], r["policy"]) for r in done.rows() if r["share"] == 0.1}
    assert ("code", "window") in reached
    assert ("needle", "snapkv") in reached
    assert ("code", "snapkv") not in reached


def test_the_stream_holds_every_bounded_policy(small, done):
    policies = {row["policy"] for row in done.stream()}
    assert policies == {"recomputed window", "streaming_llm", *bounded(small.specs())}


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(small, done, model, tokenizer, tmp_path):
    again = evaluate(replace(small, tasks=("scratch", "stream")), model, tokenizer, tmp_path / "again")
    assert again.rows() == [row for row in done.rows() if row["task"] == "scratch"]
    assert again.stream() == done.stream()
    few = replace(small, tasks=("needle",), seed=1)
    other = evaluate(few, model, tokenizer, tmp_path / "other").rows()
    assert [r["nll"] for r in other] != [r["nll"] for r in done.rows() if r["task"] == "needle"]


@pytest.mark.parametrize(
    ("tasks", "stop_after", "kept"),
    [
        (("needle", "code"), 1, set()),
        (("needle", "code"), 3, {"needle-chat-256"}),
        (("code", "stream"), 100, {"code-plain-256"}),
    ],
)
def test_a_run_that_was_interrupted_is_continued(
    small, model, tokenizer, tmp_path, monkeypatch, tasks, stop_after, kept
):
    plan = replace(small, tasks=tasks, lengths=(256,))
    whole = evaluate(plan, model, tokenizer, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        evaluate(plan, model, tokenizer, tmp_path / "run", stop_after)
    assert {file.stem for file in (tmp_path / "run" / "parts").iterdir()} == kept
    computed = []
    monkeypatch.setattr(run, "_sample_rows", lambda *args, real=run._sample_rows: computed.append(1) or real(*args))
    folder = evaluate(plan, model, tokenizer, tmp_path / "run")
    samples = {"needle-chat-256": 2, "code-plain-256": 1}
    wanted = sum(count for name, count in samples.items() if name.partition("-")[0] in tasks and name not in kept)
    assert len(computed) == wanted
    assert folder.rows() == whole.rows()
    assert folder.stream() == whole.stream()
    evaluate(plan, model, tokenizer, tmp_path / "run")  # nothing is left to do
    assert len(computed) == wanted


def test_other_settings_and_other_weights_do_not_mix(small, done, model):
    with pytest.raises(EvalError, match=r"settings\.seed: 0 there, 4 here"):
        RunFolder(done.path, run.meta_of(replace(small, seed=4), model))
    with pytest.raises(EvalError, match=r"settings\.budgets: 0\.5,0\.1 there, 0\.3 here"):
        RunFolder(done.path, run.meta_of(replace(small, budgets=(0.3,)), model))
    weight = next(model.module.parameters())
    weight.data += 0.25
    try:
        with pytest.raises(EvalError, match=r"model\.weights"):
            RunFolder(done.path, run.meta_of(small, model))
    finally:
        weight.data -= 0.25


def test_a_folder_of_something_else_is_left_alone(small, model, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(EvalError, match="holds no evaluation"):
        RunFolder(tmp_path, run.meta_of(small, model))


def test_meta_names_no_machine(small, model):
    meta = run.meta_of(small, model)
    assert set(meta) == {"settings", "model", "versions"}
    assert set(meta["versions"]) == {"warmkv", "python", "torch", "transformers"}
    json.dumps(meta)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": (256, 720)}, "--lengths go up to 704, got 720"),
        ({"lengths": (720,), "tasks": ("stream",)}, None),
    ],
)
def test_a_model_that_cannot_do_it_is_refused(small, model, change, says):
    plan = replace(small, **change)
    if says is None:
        run.check(plan, model)
    else:
        with pytest.raises(EvalError, match=says):
            run.check(plan, model)


def test_a_rotation_that_changes_with_length_is_refused_where_it_matters(small, model):
    changing = replace(model, fixed_rotation=False)
    with pytest.raises(EvalError, match="at most so many --stream-tokens"):
        run.check(replace(small, stream_tokens=2000), changing)
    with pytest.raises(EvalError, match="as streaming_llm must"):
        run.check(replace(small, policies=("streaming_llm",), tasks=("code",)), changing)
    run.check(replace(small, tasks=("code",)), changing)


def test_the_summary_has_every_policy_at_every_share(small, done):
    entries = summary.summarise(done.rows())
    document = json.loads(json.dumps(summary.document(done.meta, entries, done.stream())))
    found = {(item["policy"], item["share"]): item for item in document["policies"]}
    assert set(found) >= {("full", None), ("full+kivi4", None), ("window", 0.5), ("window", 0.1), ("snapkv", 0.5)}
    assert found["full", None]["relative"] in (1.0, None)
    assert found["snapkv", 0.1]["reached"] < 1
    assert document["stream"][0]["policy"] == "recomputed window"

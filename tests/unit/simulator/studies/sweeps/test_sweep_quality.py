"""Retention by hand: what was measured, what lies between, and what nobody knows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from warmkv.policy_spec import PolicySpec
from warmkv.simulator.studies.sweeps.sweep_quality import QualityError, curves, label_of, read, retention


def row(policy, share, score, kept, sample=0, task="needle", prompt=1000):
    return {
        "task": task, "variant": "plain", "length": prompt, "depth": None, "sample": sample, "policy": policy,
        "share": share, "score": score, "kept_tokens": kept / 3, "prompt_tokens": prompt,
        "budget": None if policy.startswith("full") else kept,
    }  # fmt: skip


def spec(text):
    return PolicySpec.model_validate(text)


ROWS = [
    row("full", None, 1.0, 1000),
    row("full", None, 0.5, 1000, sample=1),
    row("full", None, 0.8, 1000, task="code"),
    row("snapkv", 0.1, 0.4, 100),
    row("snapkv", 0.1, 0.2, 100, sample=1),
    row("snapkv", 0.1, 0.4, 100, task="code"),
    row("snapkv", 0.5, 1.0, 500),
    row("full+kivi4", None, 0.9, 1000),
    row("full+kivi4", None, 0.6, 1000, sample=1),
    row("full+kivi4", None, 0.8, 1000, task="code"),
    row("snapkv+kivi4", 0.2, 0.5, 600),
    row("h2o", 0.5, 0.9, 500, sample=7),
]


def test_retention_is_over_the_full_cache_on_the_same_samples_with_tasks_alike():
    found = curves(ROWS)
    assert found["full"].retention == (1.0,)
    # 10%: (0.3 + 0.4) / 2 over (0.75 + 0.8) / 2; 50%: one sample, on which both are right
    assert found["snapkv"].budgets == (0.1, 0.5)  # fewer tokens are kept: most layers have a window
    assert found["snapkv"].retention == pytest.approx((0.35 / 0.775, 1.0))
    assert "h2o" not in found  # its sample was not measured with the full cache


def test_between_two_budgets_it_is_interpolated_and_beyond_them_unknown():
    found = curves(ROWS)
    low = 0.35 / 0.775
    assert retention(found, spec("snapkv@0.1"), {1000: 3}) == pytest.approx(low)
    assert retention(found, spec("snapkv@0.3"), {1000: 3}) == pytest.approx((low + 1) / 2)
    assert retention(found, spec("snapkv@0.05"), {1000: 3}) is None
    assert retention(found, spec("snapkv@0.7"), {1000: 3}) is None
    assert retention(found, spec("pyramidkv@0.3"), {1000: 3}) is None
    assert retention(found, spec("snapkv@0.3:window=16"), {1000: 3}) is None


def test_a_budget_in_tokens_is_another_share_of_every_prompt():
    found = curves(ROWS)
    low = 0.35 / 0.775
    # 500 of 5,000 tokens are a tenth; a prompt of 400 is kept whole, as the full cache keeps it
    assert retention(found, spec("snapkv@500"), {5000: 1, 400: 3}) == pytest.approx((low + 3) / 4)
    assert retention(found, spec("snapkv@500"), {50_000: 1, 400: 3}) is None
    assert retention(found, spec("snapkv@500+kivi4"), {400: 3}) == pytest.approx((0.75 + 0.8) / 2 / 0.775)


def test_without_results_nothing_is_known_the_full_cache_included():
    assert retention({}, spec("full"), {1000: 1}) is None
    assert retention({}, spec("snapkv@0.2"), {10: 1}) is None
    assert retention(curves(ROWS), spec("full"), {1000: 1}) == 1.0
    assert retention(curves(ROWS), spec("snapkv@0.2"), {}) is None
    assert curves([row("full", None, 0.0, 1000), row("snapkv", 0.1, 0.0, 100)]) == {}


def test_labels_are_those_of_the_results():
    for text, label in [
        ("snapkv@0.2+ring+kivi4:window=16", "snapkv+ring+kivi4:window=16"),
        ("full", "full"),
        ("kivi", "full+kivi4:residual=128"),
        ("h2o@128", "h2o"),
    ]:
        assert label_of(spec(text)) == label


def test_a_file_of_results(tmp_path):
    file = tmp_path / "results.parquet"
    pq.write_table(pa.Table.from_pylist([{**one, "nll": 1.0} for one in ROWS]), file)
    assert read(file) == curves(ROWS)


def test_what_is_no_file_of_results_is_said(tmp_path):
    with pytest.raises(QualityError, match="cannot read"):
        read(tmp_path / "none.parquet")
    (tmp_path / "text").write_text("no parquet here, just words")
    with pytest.raises(QualityError, match="is no parquet file"):
        read(tmp_path / "text")
    pq.write_table(pa.table({"task": ["needle"]}), tmp_path / "other")
    with pytest.raises(QualityError, match="has no column variant"):
        read(tmp_path / "other")

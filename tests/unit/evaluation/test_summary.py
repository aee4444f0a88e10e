"""Means, what is left of the full cache's score, and the front, on rows small enough to do by hand."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from warmkv.evaluation import table
from warmkv.evaluation.plan import EvalPlan
from warmkv.evaluation.summary import pareto, stream_summary, summarise


def row(task, sample, policy, share, score, size, full=1000):
    return {
        "task": task, "variant": "chat", "length": 512, "depth": None, "sample": sample, "policy": policy,
        "share": share, "score": score, "nll": 1.0, "bytes": size, "full_bytes": full, "kept_tokens": 5.0,
    }  # fmt: skip


ROWS = [
    row("multi", 0, "full", None, 1.0, 1000),
    row("multi", 1, "full", None, 0.0, 1000),
    row("code", 0, "full", None, 0.5, 1000),
    row("multi", 0, "snapkv", 0.2, 1.0, 200),
    row("multi", 1, "snapkv", 0.2, 1.0, 100),
    row("multi", 0, "snapkv", 0.1, 0.5, 80),
    row("multi", 0, "full+kivi4", None, 1.0, 240),
    row("multi", 1, "full+kivi4", None, 0.0, 260),
    row("code", 0, "full+kivi4", None, 0.5, 250),
]


def entries():
    return {(entry.all.policy, entry.all.share): entry for entry in summarise(ROWS)}


def test_tasks_weigh_alike_and_the_full_cache_is_compared_on_the_same_samples():
    full, some, few = (entries()[key] for key in (("full", None), ("snapkv", 0.2), ("snapkv", 0.1)))
    assert (full.all.score, full.all.relative, full.all.reached) == (0.5, 1.0, 1.0)  # mean of 0.5 and 0.5
    assert (some.all.score, some.all.relative) == (1.0, 2.0)
    assert some.all.reached == pytest.approx(2 / 3)
    assert some.tasks["multi"].reached == 1.0
    assert (some.all.bytes, some.all.bytes_share, some.all.most_bytes_share) == (150, pytest.approx(0.15), 0.2)
    assert (few.all.relative, few.tasks["multi"].reached) == (0.5, 0.5)  # of the sample that it reached


def test_the_front_holds_what_nothing_beats():
    cells = {key: entry.all for key, entry in entries().items()}
    assert pareto(cells.values()) == [cells["snapkv", 0.1], cells["snapkv", 0.2]]
    assert pareto([cells["full", None]]) == [cells["full", None]]


def test_a_block_holds_what_fits_and_names_what_does_not():
    plan = EvalPlan(policies=("snapkv", "full+kivi4", "window"), budgets=(0.2, 0.5))
    found = entries()
    blocks = dict(table.blocks(plan, list(found.values())))
    assert list(blocks) == [None, 0.5, 0.2]
    assert blocks[None] == {"full": found["full", None], "full+kivi4": found["full+kivi4", None]}
    assert blocks[0.5] == {"snapkv": None, "full+kivi4": found["full+kivi4", None], "window": None}
    assert blocks[0.2] == {"snapkv": found["snapkv", 0.2], "full+kivi4": None, "window": None}


def test_tasks_on_which_the_full_cache_has_nothing_right_are_named():
    """Say where scores of policies mean nothing, as of a model that thinks first, on screen and in the report."""
    failed = summarise([row("multi", 0, "full", None, 0.0, 1000), row("code", 0, "full", None, 0.5, 1000)])
    screen = Console(record=True, width=200)
    table.show(EvalPlan(policies=(), budgets=(0.5,), tasks=("multi", "code")), failed, [], screen)
    assert "full cache scores 0 on multi: " in screen.export_text()
    assert "--form plain" in table.unanswered(failed)
    assert table.unanswered(list(entries().values())) == table.unanswered([]) == ""


def test_perplexity_is_of_all_tokens_alike():
    rows = [
        {"policy": "window", "nll": 1.0, "tokens": 3, "bytes": 7, "cache_tokens": 2},
        {"policy": "window", "nll": 2.0, "tokens": 1, "bytes": 7, "cache_tokens": 2},
    ]
    (line,) = stream_summary(rows)
    assert line["perplexity"] == pytest.approx(math.exp(5 / 4))
    assert line["perplexity_last_quarter"] == pytest.approx(math.exp(2))

"""The results on screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from warmkv.evaluation import matching
from warmkv.evaluation.plan import FULL, EvalPlan, bounded
from warmkv.evaluation.summary import Row, SummaryRow, stream_summary
from warmkv.evaluation.tasks import STREAM
from warmkv.terminal import ruled_table, show_table

UNREACHED = "cannot reach"
CAPTION = (
    "score: share of answers right (copying, summary, code: of tokens); mean: every task alike; of full: of the full\n"
    "cache's score on the same samples; bytes: used at most, of the full cache's; ~: only some samples can be so small"
)


def show(plan: EvalPlan, entries: Sequence[SummaryRow], stream: Sequence[Row], console: Console) -> None:
    """Print a block for every share, policies side by side, and the perplexity along the stream."""
    if entries:
        console.print("Quality at equal memory", style="italic")
        show_table(_scores(plan, entries), console)
        console.print(f"{CAPTION}\n")
        if told := unanswered(entries):
            console.print(f"{told}\n", style="yellow")
    if stream:
        cache, end = stream[0]["cache_tokens"], max(row["start"] + row["tokens"] for row in stream)
        console.print(f"Perplexity along {end:,} tokens, at the bytes of {cache:,}", style="italic")
        show_table(_stream(plan, stream), console)


def unanswered(entries: Sequence[SummaryRow]) -> str:
    """Return a warning that names the tasks on which the full cache scores 0; "" if there is none."""
    cells = next((entry.tasks for entry in entries if entry.all.policy == FULL), {})
    tasks = [task for task, cell in cells.items() if cell.score == 0]
    if not tasks:
        return ""
    return (
        f"The full cache scores 0 on {', '.join(tasks)}: there policies cannot be compared. A model that always thinks "
        "before it answers, or whose chat template begins answers with a channel, is asked with --form plain."
    )


def _scores(plan: EvalPlan, entries: Sequence[SummaryRow]) -> Table:
    names = [name for name in plan.tasks if name != STREAM]
    table = ruled_table("", "share", "policy", *names, "mean", "of full", "bytes", left=2)
    for share, policies in blocks(plan, entries):
        for at, (policy, entry) in enumerate(policies.items()):
            first = ("as it is" if share is None else f"{share:.0%}") if at == 0 else ""
            last = at == len(policies) - 1
            if entry is None:
                table.add_row(first, f"{policy}: {UNREACHED}", end_section=last)
                continue
            scores = [_score(entry, name) for name in names]
            cell = entry.all
            table.add_row(
                first,
                policy,
                *scores,
                f"{'' if cell.reached == 1 else '~'}{cell.score:.2f}",
                "" if cell.relative is None else f"{cell.relative:.0%}",
                f"{cell.bytes_share:.1%}",
                end_section=last,
            )
    return table


def blocks(plan: EvalPlan, entries: Sequence[SummaryRow]) -> list[tuple[float | None, dict[str, SummaryRow | None]]]:
    """Group the summary: policies without a share, then each share from large to small with what fits into it.

    A policy without a budget is in every block; None is what cannot reach the share.
    """
    found = {(entry.all.policy, entry.all.share): entry for entry in entries}
    specs = plan.specs()
    free = [label for label, spec in specs.items() if not matching.has_budget(spec)]
    out: list[tuple[float | None, dict[str, SummaryRow | None]]] = [
        (None, {label: found[label, None] for label in free})
    ]
    for share in sorted(set(plan.budgets), reverse=True):
        block: dict[str, SummaryRow | None] = {}
        for label in specs:
            if label == FULL:
                continue
            if label not in free:
                block[label] = found.get((label, share))
            else:
                entry = found[label, None]
                block[label] = entry if entry.all.most_bytes_share <= share else None
        out += [(share, block)] if block else []
    return out


def _score(entry: SummaryRow, task: str) -> str:
    cell = entry.tasks.get(task)
    if cell is None:
        return "-"
    return f"{'' if cell.reached == 1 else '~'}{cell.score:.2f}"


def _stream(plan: EvalPlan, rows: Sequence[Row]) -> Table:
    table = ruled_table("", "policy", "whole stream", "last quarter")
    for row in stream_summary(rows):
        table.add_row(row["policy"], f"{row['perplexity']:.2f}", f"{row['perplexity_last_quarter']:.2f}")
    for label in bounded(plan.specs()):
        if all(row["policy"] != label for row in rows):
            table.add_row(label, "-", "-")
    return table

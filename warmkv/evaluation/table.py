"""The results on screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from warmkv.evaluation import matching
from warmkv.evaluation.plan import Plan, bounded
from warmkv.evaluation.summary import Entry, Row, stream_summary
from warmkv.evaluation.tasks import STREAM

UNREACHED = "cannot reach"
CAPTION = (
    "score: share of answers right (copying, summary, code: of tokens); mean: every task alike; of full: of the full\n"
    "cache's score on the same samples; bytes: used at most, of the full cache's; ~: only some samples can be so small"
)


def show(plan: Plan, entries: Sequence[Entry], stream: Sequence[Row], console: Console) -> None:
    """Print a block for every share, policies side by side, and the perplexity along the stream."""
    if entries:
        console.print(_scores(plan, entries))
    if stream:
        console.print(_stream(plan, stream))


def _scores(plan: Plan, entries: Sequence[Entry]) -> Table:
    names = [name for name in plan.tasks if name != STREAM]
    table = Table(title="Quality at equal memory", title_justify="left", caption=CAPTION, caption_justify="left")
    table.box, table.pad_edge = box.SIMPLE_HEAD, False
    for head in ("share", "policy"):
        table.add_column(head, no_wrap=True)
    for head in (*names, "mean", "of full", "bytes"):
        table.add_column(head, justify="right", no_wrap=True)
    found = {(entry.all.policy, entry.all.share): entry for entry in entries}
    for share, policies in blocks(plan):
        for at, policy in enumerate(policies):
            first = ("as it is" if share is None else f"{share:.0%}") if at == 0 else ""
            entry, last = found.get((policy, share)), at == len(policies) - 1
            if entry is None:
                table.add_row(first, policy, UNREACHED, end_section=last)
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


def blocks(plan: Plan) -> list[tuple[float | None, list[str]]]:
    """Shares from large to small with the policies that are measured at them, first those without a budget."""
    specs = plan.specs()
    free = [label for label, spec in specs.items() if not matching.has_budget(spec)]
    rest = [label for label in specs if label not in free]
    return [(None, free), *((share, rest) for share in sorted(set(plan.budgets), reverse=True) if rest)]


def _score(entry: Entry, task: str) -> str:
    cell = entry.tasks.get(task)
    if cell is None:
        return "-"
    return f"{'' if cell.reached == 1 else '~'}{cell.score:.2f}"


def _stream(plan: Plan, rows: Sequence[Row]) -> Table:
    cache = rows[0]["cache_tokens"]
    last = max(row["start"] + row["tokens"] for row in rows)
    table = Table(
        title=f"Perplexity along {last:,} tokens, at the bytes of {cache:,}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for head in ("whole stream", "last quarter"):
        table.add_column(head, justify="right")
    for row in stream_summary(rows):
        table.add_row(row["policy"], f"{row['perplexity']:.2f}", f"{row['perplexity_last_quarter']:.2f}")
    for label in bounded(plan.specs()):
        if all(row["policy"] != label for row in rows):
            table.add_row(label, UNREACHED, UNREACHED)
    return table

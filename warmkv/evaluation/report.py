"""`report.html`: one page with everything, readable on screen and on paper, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from warmkv.evaluation import charts, table
from warmkv.evaluation.plan import FULL, EvalPlan
from warmkv.evaluation.summary import Cell, Row, SummaryRow, stream_summary
from warmkv.evaluation.tasks import STREAM, TASKS
from warmkv.report_page import Html, facts, figure, page, row
from warmkv.report_page import cell as td
from warmkv.report_page import table as html_table

METHOD = """
<p>Every sample is computed once in full. Then each policy, at each share, keeps its part of the keys and values in a
decode slot of its own, and all slots decode the same given tokens in one batch. An answer is right if each of its
tokens was the most likely one at its place. As in the service, the first token after a prompt comes from all of it.</p>
<p>Shares are of the bytes that the full cache takes for the same prompt and answer. A policy gets the largest budget in
tokens whose bytes stay within the share until the answer ends, with everything that belongs to its entries: scales of
packed numbers, scores, second copies of sinks, bounds of pages, and the new tokens themselves. What an allocator rounds
up is left out. A policy without a budget is measured once, at what it takes.</p>
"""


def render(plan: EvalPlan, meta: Row, entries: Sequence[SummaryRow], rows: Sequence[Row], stream: Sequence[Row]) -> str:
    """Render the page of a run."""
    names = [name for name in plan.tasks if name != STREAM]
    look = charts.look_of([*plan.specs(), *(row["policy"] for row in stream)])
    model = meta["model"]
    parts = [
        f"<h1>KV cache compression: quality of {escape(model['name'])}</h1>",
        f'<p class="soft">{escape(_sentence(plan, names))}</p>',
    ]
    if entries:
        parts += ["<h2>Quality at equal memory</h2>", _table(plan, names, entries)]
        parts += [f"<p><b>{escape(told)}</b></p>"] if (told := table.unanswered(entries)) else []
        parts += ["<h2>Quality against bytes</h2>"]
        parts += [figure(charts.quality_against_bytes(entries, names, look))]
        parts += [
            "<h2>Pareto front</h2>",
            "<p>No other policy has a higher mean score in fewer bytes than those on the line.",
        ]
        parts += [" Hollow: not every sample can be so small.</p>", figure(charts.pareto_front(entries, look))]
    if "needle" in names:
        parts += [
            "<h2>Needle in a haystack: depth by length</h2>",
            "<p>Share of codes recalled; a row for each policy.</p>",
        ]
        parts += [figure(svg, policy) for policy, svg in charts.heat_maps(rows, plan.budgets)]
    if stream:
        cache = stream[0]["cache_tokens"]
        parts += ["<h2>Perplexity along a stream</h2>"]
        parts += [
            f"<p>Held-out source code, token by token, every policy at the bytes of {cache:,} tokens of full cache. "
            "The recomputed window is the gold standard: the same number of tokens, computed anew all along.</p>"
        ]
        parts += [figure(charts.perplexity_along(stream, model["max_context"], look)), _stream_table(stream)]
    parts += ["<h2>How it is measured</h2>", METHOD, _tasks(names), "<h2>Run</h2>", _run(plan, meta)]
    return page(f"warmkv eval: {model['name']}", parts)


def _sentence(plan: EvalPlan, names: Sequence[str]) -> str:
    lengths = ", ".join(f"{length:,}" for length in plan.lengths)
    return (
        f"{len(plan.specs())} policies, {len(names)} tasks, lengths {lengths} tokens, {plan.samples} samples for every "
        f"task, length and depth, seed {plan.seed}."
    )


def _table(plan: EvalPlan, names: Sequence[str], entries: Sequence[SummaryRow]) -> str:
    lines = []
    for share, policies in table.blocks(plan, entries):
        for at, (policy, entry) in enumerate(policies.items()):
            begun = ["" if at else "as it is" if share is None else f"{share:.0%}", policy]
            css = "" if at else "first"
            if entry is None:
                unreached = td(table.UNREACHED, "none name", colspan=str(len(names) + 3))
                lines.append(row([*begun, unreached], css, names=2))
                continue
            left = "" if entry.all.relative is None else f"{entry.all.relative:.0%}"
            scores = [_score(entry.tasks.get(name)) for name in names]
            lines.append(row([*begun, _score(entry.all), left, f"{entry.all.bytes_share:.1%}", *scores], css, names=2))
    heads = ("share", "policy", "mean", "of full", "bytes", *names)
    below = f'<p class="soft">{escape(table.CAPTION)}; -: {table.UNREACHED} on any sample.</p>'
    return html_table(heads, lines, names=2) + below


def _score(cell: Cell | None) -> Html:
    if cell is None:
        return td("-", "none")
    title = f"{cell.samples} samples, {cell.nll:.2f} nats a token, {cell.kept_tokens:.0f} tokens kept"
    mark = "" if cell.reached == 1 else "~"
    return td(f"{mark}{cell.score:.2f}", "score", style=f"--s:{cell.score:.2f}", title=title)


def _stream_table(stream: Sequence[Row]) -> Html:
    rows = [
        (
            found["policy"],
            f"{found['perplexity']:.2f}",
            f"{found['perplexity_last_quarter']:.2f}",
            f"{found['bytes']:,}",
        )
        for found in stream_summary(stream)
    ]
    return html_table(("policy", "whole stream", "last quarter", "bytes"), rows)


def _tasks(names: Sequence[str]) -> str:
    items = (
        f"<li><b>{name}</b> ({escape(TASKS[name].workload)}): {escape(TASKS[name].about)}"
        f"{'; scored by token' if TASKS[name].by_token else ''}</li>"
        for name in names
    )
    return f"<ul>{''.join(items)}</ul>"


def _run(plan: EvalPlan, meta: Row) -> Html:
    return facts({**meta["model"], **meta["versions"], "seed": plan.seed, "reference": f"{FULL}, nothing left out"})

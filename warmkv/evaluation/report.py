"""`report.html`: one page with everything, readable on screen and on paper, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from warmkv.evaluation import charts, table
from warmkv.evaluation.plan import FULL, EvalPlan
from warmkv.evaluation.summary import Cell, Row, SummaryRow, stream_summary
from warmkv.evaluation.tasks import STREAM, TASKS

CSS = """
:root { color-scheme: light; --ink: #222; --soft: #666; --line: #ddd; --hue: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.5rem 4rem; background: #fff; color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; } h3 { font-size: 1rem; }
p, li { max-width: 52rem; } .soft { color: var(--soft); }
figure { margin: 1rem 0; break-inside: avoid; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; width: 100%; }
th, td { padding: .22rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .name { text-align: left; }
thead th { border-bottom: 2px solid var(--ink); }
tbody tr.first > * { border-top: 1px solid var(--ink); }
td.score { background: color-mix(in srgb, var(--hue) calc(var(--s) * 45%), white); }
td.none { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } table { font-size: 7.5pt; } h2 { break-after: avoid; }
  td.score { print-color-adjust: exact; -webkit-print-color-adjust: exact; } .scroll { overflow: visible; }
}
"""

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
    look = charts.looks([*plan.specs(), *(row["policy"] for row in stream)])
    model = meta["model"]
    parts = [
        f"<h1>KV cache compression: quality of {escape(model['name'])}</h1>",
        f'<p class="soft">{escape(_sentence(plan, names))}</p>',
    ]
    if entries:
        parts += ["<h2>Quality at equal memory</h2>", _table(plan, names, entries)]
        parts += ["<h2>Quality against bytes</h2>"]
        parts += [_figure("", charts.quality_against_bytes(entries, names, look))]
        parts += [
            "<h2>Pareto front</h2>",
            "<p>No other policy has a higher mean score in fewer bytes than those on the line.",
        ]
        parts += [" Hollow: not every sample can be so small.</p>", _figure("", charts.pareto_front(entries, look))]
    if "needle" in names:
        parts += [
            "<h2>Needle in a haystack: depth by length</h2>",
            "<p>Share of codes recalled; a row for each policy.</p>",
        ]
        parts += [_figure(policy, svg) for policy, svg in charts.heat_maps(rows, plan.budgets)]
    if stream:
        cache = stream[0]["cache_tokens"]
        parts += ["<h2>Perplexity along a stream</h2>"]
        parts += [
            f"<p>Held-out source code, token by token, every policy at the bytes of {cache:,} tokens of full cache. "
            "The recomputed window is the gold standard: the same number of tokens, computed anew all along.</p>"
        ]
        parts += [_figure("", charts.perplexity_along(stream, model["max_context"], look)), _stream_table(stream)]
    parts += ["<h2>How it is measured</h2>", METHOD, _tasks(names), "<h2>Run</h2>", _run(plan, meta)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>warmkv eval: {escape(model['name'])}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _sentence(plan: EvalPlan, names: Sequence[str]) -> str:
    lengths = ", ".join(f"{length:,}" for length in plan.lengths)
    return (
        f"{len(plan.specs())} policies, {len(names)} tasks, lengths {lengths} tokens, {plan.samples} samples for every "
        f"task, length and depth, seed {plan.seed}."
    )


def _table(plan: EvalPlan, names: Sequence[str], entries: Sequence[SummaryRow]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("mean", "of full", "bytes", *names))
    lines = []
    for share, policies in table.blocks(plan, entries):
        for at, (policy, entry) in enumerate(policies.items()):
            first = ("as it is" if share is None else f"{share:.0%}") if at == 0 else ""
            row = '<tr class="first">' if at == 0 else "<tr>"
            row += f'<th>{first}</th><td class="name">{escape(policy)}</td>'
            if entry is None:
                lines.append(f'{row}<td class="none name" colspan="{len(names) + 3}">{table.UNREACHED}</td></tr>')
                continue
            cell = entry.all
            left = "" if cell.relative is None else f"{cell.relative:.0%}"
            row += f"{_score(cell)}<td>{left}</td><td>{cell.bytes_share:.1%}</td>"
            lines.append(row + "".join(_score(entry.tasks.get(name)) for name in names) + "</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th>share</th><th class="name">policy</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="soft">{escape(table.CAPTION)}; -: {table.UNREACHED} on any sample.</p>'
    )


def _score(cell: Cell | None) -> str:
    if cell is None:
        return '<td class="none">-</td>'
    title = f"{cell.samples} samples, {cell.nll:.2f} nats a token, {cell.kept_tokens:.0f} tokens kept"
    mark = "" if cell.reached == 1 else "~"
    return f'<td class="score" style="--s:{cell.score:.2f}" title="{title}">{mark}{cell.score:.2f}</td>'


def _stream_table(stream: Sequence[Row]) -> str:
    lines = "".join(
        f'<tr><td class="name">{escape(row["policy"])}</td><td>{row["perplexity"]:.2f}</td>'
        f"<td>{row['perplexity_last_quarter']:.2f}</td><td>{row['bytes']:,}</td></tr>"
        for row in stream_summary(stream)
    )
    head = "<th>policy</th><th>whole stream</th><th>last quarter</th><th>bytes</th>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _tasks(names: Sequence[str]) -> str:
    items = (
        f"<li><b>{name}</b> ({escape(TASKS[name].workload)}): {escape(TASKS[name].about)}"
        f"{'; scored by token' if TASKS[name].by_token else ''}</li>"
        for name in names
    )
    return f"<ul>{''.join(items)}</ul>"


def _run(plan: EvalPlan, meta: Row) -> str:
    facts = {**meta["model"], **meta["versions"], "seed": plan.seed, "reference": f"{FULL}, nothing left out"}
    return f"<dl>{''.join(f'<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>' for k, v in facts.items())}</dl>"


def _figure(caption: str, svg: str) -> str:
    head = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{head}{svg}</figure>"

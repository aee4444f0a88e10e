"""The shell of every HTML report: one page and style sheet, on screen and paper, without a network or matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = """
:root { color-scheme: light; --ink: #222; --soft: #666; --line: #ddd; --hue: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.5rem 4rem; background: #fff; color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p, li { max-width: 52rem; } .soft { color: var(--soft); }
figure { margin: 1rem 0; break-inside: avoid; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; } pre { font-size: .8rem; overflow-x: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { padding: .22rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
.name { text-align: left; }
thead th { border-bottom: 2px solid var(--ink); }
tr.front > * { font-weight: 600; }
tbody tr.first > * { border-top: 1px solid var(--ink); }
td.score { background: color-mix(in srgb, var(--hue) calc(var(--s) * 45%), white); }
td.none { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } table { font-size: 7.5pt; } h2 { break-after: avoid; }
  td.score { print-color-adjust: exact; -webkit-print-color-adjust: exact; } .scroll { overflow: visible; }
}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Return the whole document; `parts` are HTML."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


class Html(str):
    """HTML, which is not escaped again."""


def cell(text: str, css: str = "", **attributes: str) -> Html:
    """Return a table cell with a class and attributes."""
    given = {**({"class": css} if css else {}), **attributes}
    inside = "".join(f' {name}="{escape(value)}"' for name, value in given.items())
    return Html(f"<td{inside}>{escape(text)}</td>")


def row(cells: Sequence[str], css: str = "", names: int = 1) -> Html:
    """Return a table row; plain strings become cells, the first `names` of them text rather than numbers."""
    inside = "".join(
        text if isinstance(text, Html) else cell(text, "name" if at < names else "") for at, text in enumerate(cells)
    )
    return Html(f'<tr class="{css}">{inside}</tr>' if css else f"<tr>{inside}</tr>")


def table(heads: Sequence[str], rows: Sequence[Sequence[str] | Html], names: int = 1) -> Html:
    """Return a table that scrolls where the page is too narrow; rows are cells, or made by `row`."""
    lines = "".join(one if isinstance(one, Html) else row(one, names=names) for one in rows)
    named = "".join(f'<th class="name">{escape(head)}</th>' for head in heads[:names])
    titles = named + "".join(f"<th>{escape(head)}</th>" for head in heads[names:])
    return Html(f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>')


def figure(drawing: str, caption: str = "") -> Html:
    """Return a drawing with its caption, if any."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return Html(f"<figure>{below}{drawing}</figure>")


def facts(named: Mapping[str, object]) -> Html:
    """Return names and values, one a line."""
    return Html(f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>' for k, v in named.items())}</dl>")


def svg(figure: Figure, name: str) -> str:
    """Render a figure as an SVG element for a page; its ids begin with `name`, since a page has them only once."""
    out = io.StringIO()
    figure.savefig(
        out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    return re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)

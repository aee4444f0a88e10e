"""A report as one HTML page, readable on screen and on paper, without a network. Importable without matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = """
:root { color-scheme: light; --ink: #222; --soft: #666; --line: #ddd; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.5rem 4rem; background: #fff; color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p { max-width: 52rem; } .soft { color: var(--soft); }
figure { margin: 1rem 0; break-inside: avoid; } figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; width: 100%; }
th, td { padding: .22rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
.name { text-align: left; }
thead th { border-bottom: 2px solid var(--ink); }
tr.front > * { font-weight: 600; }
td.none { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } table { font-size: 7.5pt; } h2 { break-after: avoid; }
  .scroll { overflow: visible; }
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

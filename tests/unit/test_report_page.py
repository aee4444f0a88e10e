"""One shell and one style sheet for all reports; what comes from outside is escaped."""

from __future__ import annotations

from pathlib import Path

import warmkv
from warmkv.report_page import CSS, cell, facts, figure, page, row, table

OUTSIDE = '<b onload="x">&'
ESCAPED = "&lt;b onload=&quot;x&quot;&gt;&amp;"
ROOT = Path(warmkv.__file__).parent


def test_there_is_one_shell_and_one_style_sheet():
    shells = [
        path.name
        for path in ROOT.rglob("*.py")
        if any(tag in path.read_text(encoding="utf-8") for tag in ("<!doctype", "<style", "<html", "border-collapse"))
    ]
    assert shells == ["report_page.py"]


def test_a_page_escapes_what_is_named_in_it():
    parts = [table((OUTSIDE, "n"), [(OUTSIDE, "1")]), facts({OUTSIDE: OUTSIDE}), figure("<svg></svg>", OUTSIDE)]
    html = page(OUTSIDE, parts)
    assert OUTSIDE not in html
    assert html.count(ESCAPED) == 6
    assert html.count("<style>") == 1
    assert CSS in html


def test_cells_are_names_or_numbers_and_rows_keep_what_is_html():
    assert row(["a", "1", cell("2", "none", title=OUTSIDE)], "front") == (
        f'<tr class="front"><td class="name">a</td><td>1</td><td class="none" title="{ESCAPED}">2</td></tr>'
    )
    assert table(["a", "b"], [row(["x", "y"], names=2)], names=2).count('class="name"') == 4

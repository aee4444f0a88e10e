"""What the docs say of every method is what the method declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from warmkv.policies.compression import tables
from warmkv.policy_spec import METHODS

DOCS = Path(__file__).parents[4] / "docs"


def test_the_tables_of_methods_are_up_to_date():
    page = (DOCS / "policies.md").read_text()
    assert tables.fill(page) == page, "make docs"
    assert tables.fill("<!-- methods -->\nold\n<!-- end -->").count("\n") == len(METHODS) + 3


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_with_its_knobs(name):
    page = (DOCS / "policies" / f"{name}.md").read_text()
    said: dict[str, str] = {}
    for knobs, values in re.findall(r"^\| (`.*?`) \| (.*?) \|", page, re.MULTILINE):  # several may share a line
        said |= zip(knobs.replace("`", "").split(", "), values.split(", "), strict=True)
    assert said == tables.defaults(METHODS[name].knobs)

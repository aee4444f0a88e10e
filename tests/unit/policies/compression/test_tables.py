"""What the docs say of methods and storages is what these declare, and nothing else looks at their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from warmkv.policies.compression import tables
from warmkv.policy_spec import METHODS, STORAGES

DOCS = Path(__file__).parents[4] / "docs"


def test_the_tables_are_up_to_date():
    page = (DOCS / "policies.md").read_text()
    assert tables.fill(page) == page, "make docs"
    assert tables.fill("<!-- methods -->\nold\n<!-- end -->").count("\n") == len(METHODS) + 3
    assert tables.fill("<!-- storages -->\nold\n<!-- end -->").count("\n") == len(STORAGES) + 3


@pytest.mark.parametrize("alias", sorted({storage.alias for storage in STORAGES.values()} - {""}))
def test_every_storage_has_a_page_that_names_its_policies_and_its_file(alias):
    page = (DOCS / "policies" / f"{alias}.md").read_text()
    alike = [storage for storage in STORAGES.values() if storage.alias == alias]
    for storage in alike:
        assert tables.alias(storage) in page
        assert f"+{storage.name}" in page
        assert f"{type(storage).__module__.replace('.', '/')}.py" in page


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_with_its_knobs(name):
    page = (DOCS / "policies" / f"{name}.md").read_text()
    said: dict[str, str] = {}
    for knobs, values in re.findall(r"^\| (`.*?`) \| (.*?) \|", page, re.MULTILINE):  # several may share a line
        said |= zip(knobs.replace("`", "").split(", "), values.split(", "), strict=True)
    assert said == tables.defaults(METHODS[name].knobs)


def test_nothing_is_decided_by_the_name_of_a_method_or_of_a_storage():
    decided = re.compile(r"\b(spec|policy|method)\.(name|storage) (==|!=|in|not in) |storage\.startswith")
    package = DOCS.parent / "warmkv"
    found = [
        f"{file.relative_to(package)}: {line.strip()}"
        for file in sorted(package.rglob("*.py"))
        for line in file.read_text().splitlines()
        if decided.search(line) and file.parent.name not in ("methods", "storages")
    ]
    assert found == []

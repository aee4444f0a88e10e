"""The page of all commands is that of the commands."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from warmkv.cli import app, commands_page

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_up_to_date():
    written = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert written == commands_page.page(typer.main.get_command(app)), "run make docs"


def test_it_has_every_command_and_its_links_lead_somewhere():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## `warmkv (.*)`$", page, re.MULTILINE))
    assert headings >= {"serve", "replay", "policy set", "k8s render"}
    assert "docs" not in headings  # hidden: it is for those who change warmkv
    for link in re.findall(r"\[More\]\(([^)#]+)", page):
        assert (DOCS / link).resolve().is_file(), link
    for anchor in re.findall(r"\(#warmkv-([^)]+)\)", page):
        assert anchor.replace("-", " ") in {heading.replace("-", " ") for heading in headings}


def test_it_names_the_commands_that_end_with_1():
    sentence = re.search(r"traceback; (.*) exit 1 where", commands_page.HEAD, re.DOTALL)[1]
    commands = typer.main.get_command(app).commands.items()
    ends = {
        name: [one.error_code for one in getattr(found, "commands", {"": found}).values()] for name, found in commands
    }
    assert set(re.findall(r"`([\w-]+)`", sentence)) == {name for name, codes in ends.items() if 1 in codes}

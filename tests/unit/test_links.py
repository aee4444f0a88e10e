"""Check that every link between our documents leads to a file, and to a heading that is there; settings exist."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from warmkv.config import Config

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SETTING = re.compile(rf"(?<![\w./-])({'|'.join(Config.model_fields)})\.([a-z_]\w*)(\*?)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def documents() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [Path(name) for name in listed.stdout.split()]


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one) for one in HEADING.findall(prose(path)))
    return {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in shown}


@cache
def prose(path: Path) -> str:
    return FENCED.sub("", path.read_text())


@pytest.mark.parametrize("document", documents(), ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    lost = []
    for link in LINK.findall(prose(ROOT / document)):
        if ":" in link:  # another site
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / document).parent / name if name else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target.resolve())):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("document", [name for name in documents() if name.name != "CHANGELOG.md"], ids=str)
def test_settings_that_are_named_exist(document: Path) -> None:
    unknown = []
    for section, name, star in SETTING.findall((ROOT / document).read_text()):
        known = type(getattr(Config(), section)).model_fields
        if name != "md" and not (any(one.startswith(name) for one in known) if star else name in known):
            unknown.append(f"{section}.{name}{star}")
    assert unknown == []


def test_documents_are_found() -> None:
    found = documents()
    if not found:
        pytest.skip("not a git checkout")
    assert Path("README.md") in found

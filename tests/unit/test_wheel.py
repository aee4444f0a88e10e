"""What `pip install` brings: the model that runs without a download, and nothing that only trains or tests it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_model_is_in_it(names: set[str]) -> None:
    assert {f"warmkv/models/tiny/{name}" for name in MODEL} <= names
    assert {"warmkv/cli/__init__.py", "warmkv/__main__.py", "warmkv/models/tiny/tasks.py"} <= names


def test_the_console_is_in_it(names: set[str]) -> None:
    files = ("index.html", "style.css", "console.js", "icon.svg")
    assert {f"warmkv/platform/gateway/console/{name}" for name in files} <= names


def test_what_trains_tests_and_races_is_not(names: set[str]) -> None:
    folders = {name.split("/")[0] for name in names}
    assert {folder.partition("-")[0] for folder in folders} == {"warmkv"}
    assert not [name for name in names if Path(name).stem in ("train", "net", "vocabulary")]

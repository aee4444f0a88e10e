"""The commit that a figure belongs to."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from warmkv.measuring import machine


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_package_and_of_no_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "x")
    for root, expected in [(tmp_path, git("rev-parse", "HEAD")[:12]), (tmp_path / ".venv" / "site-packages", None)]:
        file = root / "warmkv" / "measuring" / "machine.py"
        file.parent.mkdir(parents=True)
        monkeypatch.setattr(machine, "__file__", str(file))
        assert machine.commit() == expected

"""Starting a service on this machine: what fails before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

START = """
from warmkv.config import Config
from warmkv.platform.local import StartError, start_ray
try:
    start_ray(Config())
except StartError as error:
    print(error)
"""


def test_a_ray_that_does_not_start_is_one_error_with_the_place_of_its_logs(tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    environment = os.environ | {
        "RAY_TMPDIR": str(no_folder)
    }  # in a process of its own: Ray's settings are its environment
    told = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("Ray did not start: ")
    assert told.stdout.strip().endswith(f"its logs are in {no_folder}/ray/session_latest/logs")

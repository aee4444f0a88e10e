"""Where the published traces lie; tests of their figures are skipped without them."""

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("WARMKV_TRACES", PROJECT.parent / "shared" / "traces"))


def published(name):
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not at {FOLDER}; WARMKV_TRACES names the folder")
    return path

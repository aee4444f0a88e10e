"""The functions of warmkv that something is handed on through, to hold pictures of its way in the docs to the code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import warmkv

PACKAGE = Path(warmkv.__file__).parent
ROOT = PACKAGE.parent
HOP = re.compile(r"^ *(\d+)  (\S+\.py) +(\S+)", re.MULTILINE)


def hops(run: Callable[[], object], carries: Callable[[Any], bool]) -> list[tuple[str, str]]:
    """Call `run`; file and qualified name of every call of a function of warmkv with an argument that `carries` it."""
    calls: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(carries(frame.f_locals.get(name)) for name in names):
            calls.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def drawn(page: str, heading: str) -> list[tuple[str, str]]:
    """File and function of every hop that a section of a page of the docs draws: a number, a file, a function."""
    _, _, section = (ROOT / "docs" / page).read_text().partition(f"\n{heading}\n")
    return [(file, function) for _, file, function in HOP.findall(section.split("\n#")[0])]

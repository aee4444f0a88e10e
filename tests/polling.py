"""Wait for a condition without depending on the speed of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 240.0  # seconds: only a failure takes so long, however busy the machine is; less than pytest's timeout
PAUSE = 0.02  # seconds between two looks


def until(condition: Callable[[], T], what: str = "the condition holds", *, seconds: float = PATIENCE) -> T:
    """Return the first true value of `condition`. Raises AssertionError after `seconds` without one."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(PAUSE)
    return value

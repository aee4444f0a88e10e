"""Wait for a condition without depending on the speed of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 240.0  # seconds: only a failure takes so long, however busy the machine is; less than pytest's timeout
PAUSES = 0.02, 0.25  # seconds between two looks: at first, and at most; a look may cost a request or two


def until(condition: Callable[[], T], what: str = "the condition holds", *, seconds: float = PATIENCE) -> T:
    """Return the first true value of `condition`. Raises AssertionError after `seconds` without one."""
    deadline, (pause, most) = time.monotonic() + seconds, PAUSES
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
        pause = min(most, 1.2 * pause)
    return value

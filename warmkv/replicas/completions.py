"""Estimate when a full queue has room again, by the rate at which requests end."""

from __future__ import annotations

from collections import deque

WINDOW = 32  # ends over which the rate is taken


class Completions:
    """Keep the times at which the latest requests ended, since the engine was last idle. Seconds of any one clock."""

    def __init__(self) -> None:
        self._since = 0.0
        self._ends: deque[float] = deque(maxlen=WINDOW)

    def begin(self, now: float) -> None:
        """Forget earlier ends, when work comes after a rest."""
        self._since = now
        self._ends.clear()

    def ended(self, now: float) -> None:
        """Record the end of a request."""
        if len(self._ends) == WINDOW:
            self._since = self._ends[0]
        self._ends.append(now)

    def seconds(self, places: int, now: float) -> float | None:
        """Return the seconds until `places` more requests have ended, at the rate so far; None before the first end."""
        count = len(self._ends)
        return places * (now - self._since) / count if count else None

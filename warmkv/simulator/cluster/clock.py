"""SimPy's time, with alarms: what happens most in a replay, in less time than an event takes."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy

FIRST = 1  # the priority that SimPy gives all events: those of the same moment come in the order they were set
LATE = 2  # behind all those of the same moment

NEVER = -1  # is no alarm's number


class Alarm:
    """Calls `ring` with the time it rings at. It has one time: setting it again takes the place of the one before."""

    __slots__ = ("number", "ring")

    def __init__(self, ring: Callable[[float], Any]) -> None:
        self.ring = ring
        self.number = NEVER

    def cancel(self) -> None:
        self.number = NEVER


class Clock(simpy.Environment):
    """An environment that has alarms besides events. Both stand in the same queue."""

    def set(self, alarm: Alarm, at: float, priority: int = LATE) -> None:
        """Let an alarm ring at a time, which is not over."""
        alarm.number = number = next(self._eid)
        heappush(self._queue, (at, priority, number, alarm))

    def run(self, until: None = None) -> None:
        """Until nothing is left to happen."""
        queue = self._queue
        while queue:
            alarm = queue[0][3]
            if alarm.__class__ is Alarm:
                self._now, _, number, _ = heappop(queue)
                if number == alarm.number:  # else it was set again, or cancelled
                    alarm.ring(self._now)
            else:
                self.step()

"""Virtual time for a replay: SimPy's events, and alarms, which happen most and take less time than an event."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event

FIRST = NORMAL  # the priority that SimPy gives all events: those of the same moment come in the order they were set
LATE = 2  # behind all those of the same moment

NOT_SET: Final = -1  # is no alarm's number


class Alarm:
    """Calls `ring` with the time it rings at. It has one time: setting it again takes the place of the one before."""

    __slots__ = ("number", "ring")

    def __init__(self, ring: Callable[[float], Any]) -> None:
        self.ring = ring
        self.number = NOT_SET

    def cancel(self) -> None:
        self.number = NOT_SET


class Clock(simpy.Environment):
    """A SimPy environment with a queue of its own, in which alarms stand beside events.

    A replay sets two or three alarms a request; as SimPy events they would take three objects and five calls each.
    SimPy's queue is private, so this class brings its own: it overrides the public methods of `simpy.Environment` that
    touch the queue, and uses no private name of SimPy. A test compares it with a plain `simpy.Environment`.
    """

    now: float = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[float, int, int, Any]] = []  # time, priority, order of being set, event or alarm
        self._order = 0

    def set(self, alarm: Alarm, at: float, priority: int = LATE) -> None:
        """Let an alarm ring at a time, which is not over."""
        self._order = alarm.number = number = self._order + 1
        heappush(self._entries, (at, priority, number, alarm))

    def schedule(self, event: Event, priority: int = NORMAL, delay: float = 0) -> None:
        self._order = number = self._order + 1
        heappush(self._entries, (self.now + delay, priority, number, event))

    def peek(self) -> float:
        return self._entries[0][0] if self._entries else math.inf

    def step(self) -> None:
        """Let the next alarm ring, or process the next event. Raises simpy.core.EmptySchedule if there is none."""
        if not self._entries:
            raise EmptySchedule
        self.now, _, number, entry = heappop(self._entries)
        if entry.__class__ is not Alarm:
            _process(entry)
        elif number == entry.number:  # else it was set again, or cancelled
            entry.ring(self.now)

    def run(self, until: None = None) -> None:
        """Run until nothing is left to happen: as `step`, without a call for each alarm."""
        entries = self._entries
        while entries:
            self.now, _, number, entry = heappop(entries)
            if entry.__class__ is not Alarm:
                _process(entry)
            elif number == entry.number:
                entry.ring(self.now)


def _process(event: Event) -> None:
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)
    if not (event.ok or event.defused):
        raise event.value

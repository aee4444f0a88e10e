"""What the replicas held at the window's beginning, so that a replay does not start from empty caches.

A snapshot of the replicas is taken with the first requests, and again whenever a quarter of the window is new. The
oldest that the window still reaches back to is where a replay begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from warmkv.platform.whatif.window import RequestWindow
from warmkv.policies.contents import Contents
from warmkv.prefixes.record import RequestRecord

BLOCKS = 50_000  # of a snapshot, all replicas together, about 15 MB; those used least recently are left out
PART = 4  # snapshots that a full window reaches back to


@dataclass(frozen=True, slots=True)
class Start:
    """Where a replay begins: the requests by arrival, those of them that came before it, and what replicas held."""

    records: Sequence[RequestRecord]
    early: int = 0  # they were in flight then: their prefixes count, their figures do not
    held: Sequence[Contents] | None = None  # by replica; None if it is not known

    def within(self, ttls: Collection[str]) -> Start:
        """Return it without the requests that name other TTLs, as those from before one was removed do."""
        stays = [all(mark.ttl in ttls for mark in record.marks) for record in self.records]
        records = [record for record, one in zip(self.records, stays, strict=True) if one]
        return replace(self, records=records, early=sum(stays[: self.early]))


class Snapshots:
    """Contents of all replicas at several times, the oldest first, as far back as the window."""

    def __init__(self) -> None:
        self._taken: list[Sequence[Contents]] = []
        self._part = -1  # of all that was ever in the window, when the last one was taken

    def due(self, window: RequestWindow) -> bool:
        return int(window.turned * PART) > self._part

    def add(self, replicas: Sequence[Contents], window: RequestWindow) -> None:
        """Keep a snapshot, and give up those that the window does not reach back to."""
        self._taken.append(replicas)
        self._part = int(window.turned * PART)
        self._taken = self._reached(window)

    def start(self, window: RequestWindow) -> Start:
        """Return where a replay of the window begins."""
        records = window.records()
        usable = self._reached(window)
        if not records or not usable:
            return Start(records)
        # The first snapshot comes just after the first requests: then what came before these is told by its age.
        at = _at(usable[0]) if window.dropped else records[0].arrival
        left = [record for record in records if record.arrival + record.ttft > at]  # the others' prefixes are held
        early = sum(record.arrival < at for record in left)
        return Start(left, early, [replica.stored_by(at) for replica in usable[0]])

    def _reached(self, window: RequestWindow) -> list[Sequence[Contents]]:
        """Return snapshots since which nothing has left the window."""
        return [taken for taken in self._taken if _at(taken) >= window.whole_since]


def _at(replicas: Sequence[Contents]) -> float:
    return min((replica.at for replica in replicas), default=0.0)

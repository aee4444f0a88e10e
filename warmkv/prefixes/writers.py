"""Who pays for a prefix that several requests need before it is there.

A prefix is readable once the answer of its first writer has begun (contract, item 11). A replica that computes it once
for all who wait reports a hit to those who came later; they came before it could be read, so they are writers as well.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

Named = tuple[int, Hashable]
"""A position in a prompt, and a name of the exact prefix up to it."""


@dataclass(frozen=True, slots=True)
class _Birth:
    time: float
    hit: int  # position up to which its writer found KV: where to look next for who came before the birth


class Writers:
    """What became readable while requests wait for their answers to begin; times on one clock that never goes back.

    Holds an item per waiting request and per prefix that was written since the oldest of them arrived.
    """

    def __init__(self) -> None:
        self._arrivals: dict[Hashable, float] = {}  # in order of time, as are the births
        self._births: dict[tuple[str, Hashable], _Birth] = {}  # by replica and prefix

    def __len__(self) -> int:
        return len(self._arrivals) + len(self._births)

    def arrived(self, request: Hashable, now: float) -> None:
        """Count a request that arrives; it must begin or leave."""
        self._arrivals[request] = now

    def left(self, request: Hashable) -> None:
        """Forget a request that failed or was given up before its answer began."""
        self._arrivals.pop(request, None)
        self._forget()

    def began(
        self,
        request: Hashable,
        replica: str,
        reads: Iterable[Named],
        marks: Iterable[Named],
        hit: int,
        written: int,
        now: float,
    ) -> int:
        """Return the position up to which the request is billed as a reader.

        `reads` are the positions at which it may read and `marks` those that it writes. `hit` is the highest breakpoint
        whose KV the replica found, `written` the highest that is stored now. Where it cannot be told what else was
        readable when the request arrived, nothing was.
        """
        arrival = self._arrivals.pop(request, now)
        billed = hit
        if hit:
            keys = dict(reads)
            while billed in keys and (birth := self._births.get((replica, keys[billed]))) and birth.time > arrival:
                billed = birth.hit
            billed = billed if billed in keys else 0
        if hit < written:
            for position, key in marks:
                if hit < position <= written:
                    self._births.pop((replica, key), None)  # so that births stay in order of time
                    self._births[replica, key] = _Birth(now, hit)
        self._forget()
        return billed

    def _forget(self) -> None:
        """Drop what was readable before the oldest waiting request arrived."""
        if not self._births:
            return
        oldest = next(iter(self._arrivals.values()), math.inf)
        while self._births and next(iter(self._births.values())).time <= oldest:
            del self._births[next(iter(self._births))]

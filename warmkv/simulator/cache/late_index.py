"""What routers know of the replicas' blocks: replicas send their reports in batches, which take time to arrive."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from warmkv.prefixes.index import Depths

Held = dict[int, Depths]
"""Leading blocks of runs, by their number, on the device, there or in host memory, in any tier."""


class LateIndex:
    """An index that is told what happened and knows it later. Times are virtual seconds, and never go back by replica.

    A replica sends at once what happens `publish` seconds after its last sending, or later; what happens before is sent
    together when they are over (`Publisher` in `replicas/`). What is sent is known `delay` seconds later. `lengths` are
    the blocks of each run.
    """

    def __init__(self, publish: float, delay: float, lengths: Sequence[int]) -> None:
        self._publish, self._delay, self._lengths = publish, delay, lengths
        self._known: dict[int, dict[str, Depths]] = {}  # by run, what of it each replica holds
        self._sendings: dict[str, float] = {}  # by replica, when it sent last or will send next
        self._reports: list[tuple[float, int, str, Held]] = []  # heap: when each is known
        self._pending: dict[str, tuple[float, Held]] = {}  # by replica, its last report
        self._order = 0

    def happened(self, replica: str, held: Held, now: float) -> None:
        """Record how much a replica holds of some runs now."""
        last = self._sendings.get(replica, -math.inf)
        if now > last:
            last = self._sendings[replica] = max(now, last + self._publish)
        at, report = self._pending.get(replica, (-math.inf, held))
        if at == last:
            report |= held  # what is sent together is known together
            return
        self._pending[replica] = last, held
        self._order += 1
        heapq.heappush(self._reports, (last + self._delay, self._order, replica, held))

    def warm(self, runs: Sequence[int], now: float) -> dict[str, Depths]:
        """Return leading blocks of a prompt that each replica holds as known now; those that hold none are left out."""
        while self._reports and self._reports[0][0] <= now:
            _, _, replica, held = heapq.heappop(self._reports)
            if self._pending.get(replica, (0.0, None))[1] is held:
                del self._pending[replica]
            for run, depths in held.items():
                if depths[2]:
                    self._known.setdefault(run, {})[replica] = depths
                elif holders := self._known.get(run):
                    holders.pop(replica, None)
                    if not holders:
                        del self._known[run]
        path: list[tuple[dict[str, Depths], int]] = []
        for run in runs:
            if not (holders := self._known.get(run)):
                break
            path.append((holders, self._lengths[run]))
        warm = {}
        for replica in path[0][0] if path else ():
            device = host = anywhere = 0
            on_device = in_memory = True
            for holders, length in path:
                if (found := holders.get(replica)) is None:
                    break
                if on_device:
                    device += found[0]
                    on_device = found[0] == length
                if in_memory:
                    host += found[1]
                    in_memory = found[1] == length
                anywhere += found[2]
                if found[2] < length:
                    break
            warm[replica] = device, host, anywhere
        return warm

    def drop_replica(self, replica: str) -> None:
        """Forget a replica that is gone, and all that it sent."""
        self._reports = [report for report in self._reports if report[2] != replica]
        heapq.heapify(self._reports)
        self._sendings.pop(replica, None)
        self._pending.pop(replica, None)
        for holders in self._known.values():
            holders.pop(replica, None)

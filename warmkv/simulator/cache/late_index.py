"""What the routers know of the prefix index: replicas send their reports in batches, and they take time to arrive."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from warmkv.prefixes.index import PrefixIndex


class LateIndex:
    """An index that is told what happened and knows it later. Times are virtual seconds, and never go back by replica.

    A replica sends at once what happens `publish` seconds after its last sending, or later; what happens before is sent
    together when they are over (`Publisher` in `replicas/`). What is sent is known `delay` seconds later.
    """

    def __init__(self, publish: float, delay: float) -> None:
        self._publish, self._delay = publish, delay
        self._index = PrefixIndex()
        self._sendings: dict[str, float] = {}  # by replica, when it sent last or will send next
        self._reports: list[tuple[float, int, str, Sequence[bytes], str | None]] = []  # heap; see `happened`
        self._order = 0

    def happened(self, replica: str, keys: Sequence[bytes], tier: str | None, now: float) -> None:
        """Record that a replica holds blocks, in `tier` as the fastest; None: it dropped them."""
        last = self._sendings.get(replica, -math.inf)
        if now > last:
            last = self._sendings[replica] = max(now, last + self._publish)
        self._order += 1
        heapq.heappush(self._reports, (last + self._delay, self._order, replica, keys, tier))

    def at(self, now: float) -> PrefixIndex:
        """Return the index as known now, with what becomes known at this moment."""
        while self._reports and self._reports[0][0] <= now:
            _, _, replica, keys, tier = heapq.heappop(self._reports)
            if tier is None:
                self._index.remove(replica, keys)
            else:
                self._index.add(replica, keys, tier)
        return self._index

    def drop_replica(self, replica: str) -> None:
        """Forget a replica that is gone, and all that it sent."""
        self._reports = [report for report in self._reports if report[2] != replica]
        heapq.heapify(self._reports)
        self._sendings.pop(replica, None)
        self._index.drop_replica(replica)

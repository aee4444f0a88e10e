"""The latest requests of a service, bounded by their number and by the memory that they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import inf

from warmkv.prefixes.record import RequestRecord

REQUESTS, BYTES = 20_000, 64 << 20
"""Most requests of a window, and the memory that they may take."""

RECORD_BYTES, KEY_BYTES, MARK_BYTES = 1500, 80, 300  # of a record, a block hash, a breakpoint or candidate


class RequestWindow:
    """Hold the latest requests that succeeded; older ones go as new ones come. `failed` are arrivals of the others."""

    def __init__(self, requests: int = REQUESTS, most_bytes: int = BYTES) -> None:
        self._most, self._most_bytes = requests, most_bytes
        self._records: deque[tuple[RequestRecord, int]] = deque()
        self.failed: deque[float] = deque(maxlen=requests)
        self.bytes = 0
        self.seen = 0  # requests so far
        self._seen_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Append requests; those that failed or were cancelled are left out, as from any replay."""
        for record in records:
            if record.status == "ok":
                size = size_of(record)
                self._records.append((record, size))
                self.bytes += size
                self._seen_bytes += size
                self.seen += 1
            elif record.status == "error" and record.error != "invalid_request_error":
                self.failed.append(record.arrival)
        while self._records and (len(self._records) > self._most or self.bytes > self._most_bytes):
            self.bytes -= self._records.popleft()[1]

    @property
    def dropped(self) -> bool:
        """Return True if older requests have gone."""
        return len(self) < self.seen

    @property
    def whole_since(self) -> float:
        """Return the Unix time since which no request has left the window; 0 if none ever has."""
        if not self.dropped:
            return 0.0
        oldest = next(iter(self), None)  # requests come to it, and leave, as they end
        return oldest.arrival + oldest.e2e if oldest is not None else inf

    @property
    def turned(self) -> float:
        """Return how often the window has been filled so far."""
        return max(self.seen / self._most, self._seen_bytes / self._most_bytes)

    def __iter__(self) -> Iterator[RequestRecord]:
        """Yield the requests as they came in."""
        return (record for record, _ in self._records)

    def records(self) -> list[RequestRecord]:
        """Return the requests in the order of their arrival."""
        return sorted(self, key=lambda record: record.arrival)


def size_of(record: RequestRecord) -> int:
    """Estimate the bytes that a record takes in memory."""
    return RECORD_BYTES + KEY_BYTES * len(record.hashes) + MARK_BYTES * (len(record.marks) + len(record.reads))

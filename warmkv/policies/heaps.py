"""A priority queue whose items change their priority or leave from the middle."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
Priority = tuple[float, ...]


class LazyHeap(Generic[K]):
    """Keys by priority, least first. What is out of date stays in the heap until it surfaces or outnumbers the rest."""

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, int, K]] = []
        self._live: dict[K, tuple[Priority, int, K]] = {}
        self._order = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[K]:
        return iter(self._live)

    def set(self, key: K, priority: Priority) -> None:
        """Put a key in, or give it another priority."""
        self._order += 1  # keys of equal priority go in the order they came; keys themselves are never compared
        record = self._live[key] = (priority, self._order, key)
        heapq.heappush(self._heap, record)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._live.pop(key, None)

    def first(self) -> tuple[Priority, K] | None:
        """Return the least priority and its key; None if there is no key."""
        heap, live = self._heap, self._live
        while heap:
            priority, order, key = heap[0]
            known = live.get(key)
            if known is not None and known[1] == order:
                return priority, key
            heapq.heappop(heap)
        return None

"""Whose request is next: first come, first served within a tenant, and among tenants by the work they were given.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a tenant that asks for much cannot make others wait for
more than one of its requests at a time, and an idle tenant saves up no credit. The replica's scheduler, the priorities
that vLLM is told, and the simulator run this same code.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Tag = tuple[float, int]
"""Where a request begins in virtual time, later by its delay, and the order of arrival: the least tag is next."""

NO_TAG: Tag = (0.0, 0)


class FairQueue(Generic[Item]):
    """Waiting requests of several tenants. Work is any additive measure, here tokens."""

    __slots__ = ("_entries", "_finish", "_now", "_order")

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int, Item, str, float, float]] = deque()
        """In the order in which they would be taken: tag, order of arrival, request, tenant, work, delay."""
        self._finish: dict[str, float] = {}  # by tenant, where its last request ends in virtual time
        self._now = 0.0  # virtual time: the start tag of the request that was taken last
        self._order = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """Yield the requests in the order in which they would be taken; the queue must not change meanwhile."""
        for entry in self._entries:
            yield entry[2]

    def push(self, item: Item, tenant: str, work: float, *, behind_next: bool = False, delay: float = 0.0) -> Tag:
        """Let a request of a tenant wait; `work` is what serving it will take. Return its tag.

        With `behind_next` it comes after the one that is next now, whatever its tenant has been given. Requests that
        come later may pass it if they begin less than `delay` after it in virtual time: at most that much work of each
        tenant and one request. So an earlier request of another tenant waits longer, by its own delay at most, and what
        was delayed comes in a row. What tenants are charged does not depend on it.
        """
        start = max(self._now, self._finish.get(tenant, 0.0))
        entries = self._entries
        if behind_next and entries:
            start = max(start, entries[0][0])
        self._finish[tenant] = start + work
        self._order += 1
        tag = start + delay
        if entries and tag < entries[-1][0]:
            insort(entries, (tag, self._order, item, tenant, work, delay))
        else:
            entries.append((tag, self._order, item, tenant, work, delay))
        return tag, self._order

    def put_back(self, item: Item, tenant: str, tag: Tag) -> None:
        """Let a request that was taken wait again with the tag that it had. Its work was charged then."""
        insort(self._entries, (*tag, item, tenant, 0.0, tag[0]))

    def peek(self) -> Item:
        """Return the next request; it stays. Raises IndexError if none waits."""
        return self._entries[0][2]

    def pop(self) -> Item:
        """Take the next request out. Raises IndexError if none waits."""
        tag, _, item, _, _, delay = self._entries.popleft()
        self._now = max(self._now, tag - delay)
        self._forget()
        return item

    def take(self, item: Item) -> None:
        """Take a request out that may pass those before it: virtual time is that of the one that is next."""
        if item is self.peek():
            self.pop()
        else:
            self._remove(item)

    def remove(self, item: Item) -> bool:
        """Take a request out that is no longer wanted; whether it was there."""
        found = self._remove(item)
        if found is None:
            return False
        if found[4]:
            self._finish[found[3]] -= found[4]  # its work is not charged
        self._forget()
        return True

    def _remove(self, item: Item) -> tuple[float, int, Item, str, float, float] | None:
        for at, found in enumerate(self._entries):
            if found[2] is item:
                del self._entries[at]
                return found
        return None

    def _forget(self) -> None:
        """Let virtual time pass all that was charged once the queue is empty: later tags are not less than earlier."""
        if not self._entries and self._finish:
            self._now, self._finish = max(self._now, *self._finish.values()), {}

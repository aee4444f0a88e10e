"""When nodes expire. A use, which puts a deadline off, costs nothing here: the record is renewed when it surfaces."""

from __future__ import annotations

import heapq
import math

from warmkv.policies.prefix_tree.nodes import Node


class Deadlines:
    """Nodes whose ends may expire, the earliest first; of a node's records only that at `Node.watched` counts.

    Nothing expires before `due`.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._heap: list[tuple[float, int, Node]] = []
        self._records = 0

    def watch(self, node: Node) -> None:
        """Note the deadline of a node that has none noted, or a later one."""
        node.watched = node.expires
        self._records += 1
        heapq.heappush(self._heap, (node.expires, self._records, node))
        if node.expires < self.due:
            self.due = node.expires

    def pop(self, until: float) -> Node | None:
        """Return the next node that has expired by then. It is not watched any more."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            at, record, node = heap[0]
            if at == node.watched and node.expires > until:
                node.watched = node.expires
                heapq.heapreplace(heap, (node.expires, record, node))
                continue
            heapq.heappop(heap)
            if at == node.watched:
                node.watched = math.inf
                return node
        self.due = heap[0][0] if heap else math.inf
        return None

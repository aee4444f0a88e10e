"""When nodes expire. A use, which puts a deadline off, costs nothing here: the record is renewed when it surfaces."""

from __future__ import annotations

import heapq
import math

from warmkv.policies.prefix_tree.nodes import Node


class Deadlines:
    """Nodes whose ends may expire, the earliest first; a node has at most one record.

    Nothing expires before `due`.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._heap: list[tuple[float, int, Node]] = []
        self._records = 0

    def watch(self, node: Node) -> None:
        """Note the deadline of a node, if it has one."""
        if node.expires < math.inf:
            node.queued = True
            self._records += 1
            heapq.heappush(self._heap, (node.expires, self._records, node))
            if node.expires < self.due:
                self.due = node.expires

    def pop(self, until: float) -> Node | None:
        """Return the next node that has expired by then. It is not watched any more."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            node = heap[0][2]
            if node.expires > until:
                heapq.heapreplace(heap, (node.expires, heap[0][1], node))
            else:
                heapq.heappop(heap)
                node.queued = False
                return node
        self.due = heap[0][0] if heap else math.inf
        return None

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
        node.watched = at = node.expires
        self._records += 1
        heapq.heappush(self._heap, (at, self._records, node))
        if at < self.due:
            self.due = at

    def pop(self, until: float) -> Node | None:
        """Return the next node that has expired by then. It is not watched any more."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            at, record, node = heap[0]
            if at != node.watched:
                heapq.heappop(heap)
            elif node.expires <= until:
                heapq.heappop(heap)
                node.watched = math.inf
                return node
            elif node.is_inner:  # it is watched again once it is not
                heapq.heappop(heap)
                node.watched = math.inf
            else:
                node.watched = node.expires
                heapq.heapreplace(heap, (node.expires, record, node))
        self.due = heap[0][0] if heap else math.inf
        return None

"""When nodes expire. A use, which puts a deadline off, costs nothing here: the record is renewed when it surfaces."""

from __future__ import annotations

import heapq
import math

from warmkv.policies.prefix_tree.nodes import Node


class Deadlines:
    """Nodes whose ends may expire, the earliest first; of a node's records only that at `Node.watched` counts.

    Nothing expires before `due`. Records that do not count are at most as many as those that do, and 64.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._heap: list[tuple[float, int, Node]] = []
        self._records = self._watched = 0  # made so far; nodes that have one that counts

    def watch(self, node: Node) -> None:
        """Note the deadline of a node that has none noted, or a later one."""
        if node.watched == math.inf:
            self._watched += 1
        node.watched = at = node.expires
        self._records += 1
        heapq.heappush(self._heap, (at, self._records, node))
        if at < self.due:
            self.due = at
        self._compact()

    def forget(self, node: Node) -> None:
        """Let go of a node that is held nowhere."""
        if node.watched != math.inf:
            node.watched = math.inf
            self._watched -= 1
            self._compact()

    def _compact(self) -> None:
        """Drop the records that do not count once they are the greater part: they keep nodes in memory."""
        if len(self._heap) > 2 * self._watched + 64:
            counting = {record[2]: record for record in self._heap if record[0] == record[2].watched}
            self._heap = [*counting.values()]
            heapq.heapify(self._heap)

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
                self._watched -= 1
                return node
            elif node.expires == math.inf or node.is_inner:  # it is watched again once it is neither
                heapq.heappop(heap)
                node.watched = math.inf
                self._watched -= 1
            else:
                node.watched = node.expires
                heapq.heapreplace(heap, (node.expires, record, node))
        self._compact()
        self.due = self._heap[0][0] if self._heap else math.inf
        return None

"""The nodes of one replica's prefix tree, by the numbers that the layout gave to runs and tails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from warmkv.policies.prefix_tree.nodes import Node
from warmkv.policies.prefix_tree.tree import Path
from warmkv.policies.tiers import Tier
from warmkv.simulator.cache.layout import NONE, Layout


class Nodes:
    """The last node of each run and tail of which some tier holds blocks; None where none does.

    A run that was split has several, one behind the other.
    """

    def __init__(self, layout: Layout, tiers: Sequence[Tier], token_bytes: int) -> None:
        self.by_number: list[Node | None] = [None] * len(layout.runs)
        self._layout, self._tiers, self._token_bytes = layout, tiers, token_bytes
        self._tails: defaultdict[int, list[int]] = defaultdict(list)  # by the run before them, once it is asked for
        self._sizes: dict[tuple[int, int], list[int]] = {}  # bytes in every tier, by plain bytes and tokens

    def held(self, runs: Sequence[int]) -> Path:
        """Return the nodes of runs up to the last that is held."""
        nodes, before = self.by_number, None
        path: Path = []
        for run in runs:
            node = nodes[run]
            if node is None:
                break
            if node.parent is before:
                path.append(node)
            else:
                path += [part for part in parts_of(node) if part.span]
            before = node
        return path

    def path(self, runs: Sequence[int]) -> Path:
        """Return the nodes of runs, making those that are missing."""
        nodes, before = self.by_number, None
        path: Path = []
        for run in runs:
            node = nodes[run] or self._make(run, before)
            if node.parent is before:
                path.append(node)
            else:
                path += parts_of(node)
            before = node
        return path

    def node(self, number: int, path: Path) -> Node:
        """Return a node by its number; make it behind a path if it is missing."""
        return self.by_number[number] or self._make(number, path[-1] if path else None)

    def _make(self, number: int, parent: Node | None) -> Node:
        _, blocks, tokens = self._layout.runs[number]
        plain = tokens * self._token_bytes
        end = blocks * tokens + (parent.end if parent is not None else 0)
        node = Node(number, parent, blocks, tokens, end, plain, self._weights(plain, tokens))
        self.by_number[number] = node
        return node

    def tails_behind(self, number: int) -> list[Node]:
        """Return the tails at the end of a run that are held."""
        if not self._tails:
            for tail in range(len(self._layout.examples), len(self._layout.runs)):
                self._tails[self._layout.runs[tail].parent].append(tail)
        tails = self._tails.get(number, ())
        return [node for tail in tails if (node := self.by_number[tail]) is not None]

    def sums_of(self, node: Node, plain: int) -> Node:
        """Return the node of the column sums of all up to a node."""
        if node.sums is None:
            node.sums = Node(NONE, node, 1, 0, node.end, plain, self._weights(plain, 0))
        return node.sums

    def _weights(self, plain: int, tokens: int) -> list[int]:
        """Return bytes of a block in every tier."""
        sizes = self._sizes.get((plain, tokens))
        if sizes is None:
            sizes = [tier.weigh(plain, tokens) for tier in self._tiers]
            self._sizes[plain, tokens] = sizes
        return sizes

    def trim(self, path: Path) -> None:
        """Forget the nodes at the end of a path that did not fit anywhere."""
        for node in reversed(path):
            if node.span:
                break
            self.forget(node)

    def forget(self, node: Node) -> None:
        """Drop a node that no tier holds. The last part of a run that was split is made one with the part before it."""
        head, number = node.parent, node.number
        if number == NONE:
            assert head is not None
            head.sums = None
            node.drop()
            return
        last = self.by_number[number]
        if last is None:
            return
        if last is node and (head is None or head.number != number):  # it was never split
            self.by_number[number] = None
            node.drop()
            return
        parts = parts_of(last)
        if parts[0] is node:
            self.by_number[number] = None
            for part in parts:
                part.drop()
        elif last is node and (head := parts[-2]).sums is None and not any(copy.pinned for copy in head.copies):
            head.length, head.end = head.length + node.length, node.end
            self.by_number[number] = head
            node.drop()
            if not head.span:
                self.forget(head)


def parts_of(node: Node) -> list[Node]:
    """Return the nodes that a run was split into, up to this one."""
    parts, before = [node], node.parent
    while before is not None and before.number == node.number:
        parts.append(before)
        before = before.parent
    parts.reverse()
    return parts


def leading(path: Path) -> int:
    """Return leading blocks of a held path that one tier holds."""
    return sum([node.length for node in path[:-1]]) + path[-1].span if path else 0


def upto(path: Path, blocks: int) -> tuple[Path, int]:
    """Return the nodes of the leading blocks of a path, and how many of them the last one has."""
    for at, node in enumerate(path):
        if blocks <= node.length:
            return path[: at + 1], blocks
        blocks -= node.length
    return path, path[-1].length if path else 0

"""Writing what only memory holds to disk when a replica ends, so that the next one in its folder starts warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmkv.policies.prefix_tree.tree import Path
    from warmkv.replicas.block_store.store import BlockStore

AT_ONCE = 64
"""Blocks on their way at a time: those that are still written when the time is over."""


def spill(store: BlockStore, until: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """Copy what memory holds to the disk tier, in reverse order of eviction; return the blocks that came there.

    It ends when the store's clock shows `until`, or with as many bytes as the tier may have. What was there already and
    is colder gives way.
    """
    disk = next((at for at, place in enumerate(store.places) if place.folder is not None), None)
    if disk is None or store.clock() >= until:
        return 0
    store.expire()
    space, given, moved = store.tree.spaces[disk], 0, 0
    for tier in range(disk):
        for path, last in store.tree.by_worth(tier):
            blocks, size = _lacking(path, last, disk)
            if not blocks or store.packed(path[-1].keys[0]):
                continue
            given += size
            if given > space.capacity or store.clock() >= until:
                return moved
            store.tree.copy_down(tier, disk, path, last)
            store.apply(store.tree.changes())
            moved += blocks
            while store.moving > AT_ONCE and store.clock() < until:
                sleep(0.002)
                store.settle()
    return moved


def _lacking(path: Path, last: int, tier: int) -> tuple[int, int]:
    """Return the blocks of a path that a tier does not hold, and their bytes there."""
    counts = [(node.length if node is not path[-1] else last) - node.copies[tier].held for node in path]
    lacking = [max(0, count) for count in counts]
    return sum(lacking), sum(count * node.copies[tier].size for count, node in zip(lacking, path, strict=True))

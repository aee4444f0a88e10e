"""Writing what only memory holds to disk when a replica ends, so that the next one in its folder starts warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from warmkv.policies.prefix_tree.nodes import Node

if TYPE_CHECKING:
    from warmkv.replicas.block_store.store import BlockStore

AT_ONCE = 16
"""Blocks copied at a time, and on their way meanwhile: at most twice as many are written after the time is over."""


def spill(store: BlockStore, until: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """Copy what memory holds to the disk tier, in reverse order of eviction; return how many more blocks that holds.

    It ends when the store's clock shows `until`. As much is copied as the tier may have, and counts as used later than
    what only the tier holds, which gives way.
    """
    disk = next((at for at, place in enumerate(store.places) if place.folder is not None), None)
    if disk is None or store.clock() >= until:
        return 0
    store.expire()
    before, space = _held(store, disk), store.tree.spaces[disk]
    room, counted = space.capacity, dict[Node, int]()
    nodes = [
        (tier, node, last if node is path[-1] else node.length)
        for tier in range(disk)
        for path, last in store.tree.by_worth(tier)
        if not store.in_pack(path[-1].keys[0])
        for node in path
    ]
    for tier, node, last in nodes:
        size, begun = node.copies[disk].size, counted.get(node, 0)
        if node.parent is not None and counted.get(node.parent, 0) < node.parent.length:
            continue  # there was no room for all that it is behind
        end = min(last, begun + room // size)
        step = last if space.apart else AT_ONCE  # a node may be split where tenants are apart
        for stop in range(begun + step, end + step, step):
            if store.clock() >= until:
                return _held(store, disk) - before
            store.tree.copy_down(tier, disk, node.path(), min(stop, end))
            store.apply(store.tree.changes())
            _wait(store, AT_ONCE, until, sleep)
        if end > begun:
            room -= (end - begun) * size
            counted[node] = end
    _wait(store, 0, until, sleep)
    return _held(store, disk) - before


def _wait(store: BlockStore, most: int, until: float, sleep: Callable[[float], None]) -> None:
    """Wait until at most so many blocks are on their way, or the time is over."""
    while store.moving > most and store.clock() < until:
        sleep(0.002)
        store.settle()


def _held(store: BlockStore, tier: int) -> int:
    return sum(len(run.keys) for run in store.tree.recent(tier))

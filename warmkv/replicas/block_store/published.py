"""Publish a replica's full blocks to routers, each with the fastest tier that holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from warmkv.policies.tiers import Tiers
from warmkv.prefixes.index import TIERS

Publish = Callable[[Sequence[bytes], Sequence[bytes], str], None]
"""Takes full blocks that came to a tier, those that left the replica, and the tier."""


class PublishedBlocks:
    """Track the full blocks that were published; those that are there at the start count as published."""

    def __init__(self, tiers: Tiers, block_size: int, publish: Publish) -> None:
        self._tiers, self._block_size, self._publish = tiers, block_size, publish
        self._tier_of: dict[bytes, str] = {}
        for tier_index in tiers.indexes:
            for key in tier_index.keys_of():
                if (tier := tiers.fastest(key)) and self._is_full_block(key):
                    self._tier_of[key] = tier

    def by_tier(self) -> dict[str, list[bytes]]:
        """Return all blocks by their tier."""
        found: dict[str, list[bytes]] = {tier: [] for tier in TIERS}
        for key, tier in self._tier_of.items():
            found[tier].append(key)
        return found

    def leading(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return leading blocks in memory, and in any tier. Any thread may ask; the answer may be a step old."""
        tier_of = self._tier_of.get
        memory = bisect_left(hashes, True, key=lambda key: tier_of(key, "disk") == "disk")
        return memory, bisect_left(hashes, True, lo=memory, key=lambda key: tier_of(key) is None)

    def tell(self, changed: Sequence[bytes]) -> None:
        """Publish which of these keys are full blocks that came to another tier, or left the replica."""
        known, gone = self._tier_of, []
        came: dict[str, list[bytes]] = {}
        for key in dict.fromkeys(changed):
            tier = self._tiers.fastest(key)
            if tier == known.get(key):
                continue
            if tier is None:
                del known[key]
                gone.append(key)
            elif key in known or self._is_full_block(key):
                known[key] = tier
                came.setdefault(tier, []).append(key)
        if gone:
            self._publish((), gone, TIERS[0])
        for tier, keys in came.items():
            self._publish(keys, (), tier)

    def _is_full_block(self, key: bytes) -> bool:
        return any(
            key in tier_index and (entry := tier_index.entry(key)) is not None and entry.tokens == self._block_size
            for tier_index in self._tiers.indexes
        )

"""Track which tiers hold each block, and publish full blocks with their fastest tier to the routers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from warmkv.policies.prefix_tree.held import Change, Left
from warmkv.prefixes.index import TIERS

Publish = Callable[[Sequence[bytes], Sequence[bytes], str], None]
"""Takes full blocks that came to a tier, those that left the replica, and the tier."""

FULL = 1 << 7
"""Marks a full block, beside a bit for each tier that has it."""


class Presence:
    """Follow the changes of a prefix tree; `blocks` counts those of each tier, tails and column sums included.

    Only the engine's thread notes changes; any thread may ask, and the answer may be a step old.
    """

    def __init__(self, tiers: Sequence[str], block_size: int, publish: Publish) -> None:
        self._block_size, self._publish = block_size, publish
        self.blocks = [0] * len(tiers)
        self._tiers_of: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}  # of full blocks that have changed since routers were told
        fastest = [next((name for at, name in enumerate(tiers) if mask >> at & 1), None) for mask in range(FULL)]
        self._fastest = fastest * 2
        self._memory = sum(1 << at for at, name in enumerate(tiers) if name != "disk")

    def note(self, change: Change) -> None:
        """Record that blocks came to a tier or left it."""
        bit, known, before = 1 << change.tier, self._tiers_of, self._before
        is_full = change.run.tokens == self._block_size
        came = not isinstance(change, Left)
        self.blocks[change.tier] += len(change.run.keys) if came else -len(change.run.keys)
        for key in change.run.keys:
            mask = known.get(key, 0)
            if is_full:
                before.setdefault(key, mask)
            if came:
                known[key] = mask | bit | (FULL if is_full else 0)
            elif mask & ~bit & ~FULL:
                known[key] = mask & ~bit
            else:
                del known[key]

    def tell(self) -> None:
        """Publish which full blocks came to another tier, or left the replica."""
        gone, came = [], dict[str, list[bytes]]()
        for key, before in self._before.items():
            tier = self.fastest(key)
            if tier == self._fastest[before]:
                continue
            if tier is None:
                gone.append(key)
            else:
                came.setdefault(tier, []).append(key)
        self._before.clear()
        if gone:
            self._publish((), gone, TIERS[0])
        for tier, keys in came.items():
            self._publish(keys, (), tier)

    def settle(self) -> None:
        """Mark everything as published."""
        self._before.clear()

    def fastest(self, key: bytes) -> str | None:
        """Return the fastest tier that has a key; None if none has it."""
        return self._fastest[self._tiers_of.get(key, 0)]

    def has(self, key: bytes, tier: int) -> bool:
        return bool(self._tiers_of.get(key, 0) >> tier & 1)

    def is_below(self, key: bytes, tier: int) -> bool:
        """Return True if a slower tier has a key."""
        return (self._tiers_of.get(key, 0) & ~FULL) >> (tier + 1) > 0

    def by_tier(self) -> dict[str, list[bytes]]:
        """Return the full blocks by their tier."""
        found: dict[str, list[bytes]] = {tier: [] for tier in TIERS}
        for key, mask in self._tiers_of.items():
            if mask & FULL and (tier := self._fastest[mask]) is not None:
                found[tier].append(key)
        return found

    def leading(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return leading blocks in memory, and in any tier."""
        tiers_of, memory = self._tiers_of.get, self._memory
        held = bisect_left(hashes, True, key=lambda key: not tiers_of(key, 0) & memory)
        return held, bisect_left(hashes, True, lo=held, key=lambda key: not tiers_of(key, 0))

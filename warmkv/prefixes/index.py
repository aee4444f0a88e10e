"""Which replica holds which block: the longest warm prefix of a request, for all replicas at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Block hashes to the set of replicas that hold them, as a bit mask per block.

    Presence is prefix-closed: a replica that holds block i of a chain holds blocks 0..i-1 (stores evict the ends of
    chains first). So the longest match is found by bisection, not by a walk over all blocks.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}  # replica -> its bit
        self._counts: dict[str, int] = {}  # replica -> blocks it holds

    def __len__(self) -> int:
        """Distinct blocks held anywhere."""
        return len(self._masks)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._bits)

    def blocks_of(self, replica: str) -> int:
        return self._counts.get(replica, 0)

    def add(self, replica: str, keys: Iterable[bytes]) -> None:
        bit = self._bit(replica)
        for key in keys:
            mask = self._masks.get(key, 0)
            if not mask & bit:
                self._masks[key] = mask | bit
                self._counts[replica] += 1

    def remove(self, replica: str, keys: Iterable[bytes]) -> None:
        bit = self._bits.get(replica, 0)
        for key in keys:
            mask = self._masks.get(key, 0)
            if mask & bit:
                self._counts[replica] -= 1
                if mask == bit:
                    del self._masks[key]
                else:
                    self._masks[key] = mask & ~bit

    def drop_replica(self, replica: str) -> None:
        """Forget a replica and all that it held."""
        if bit := self._bits.get(replica, 0):
            self.remove(replica, [key for key, mask in self._masks.items() if mask & bit])
            del self._bits[replica], self._counts[replica]

    def keys_of(self, replica: str) -> list[bytes]:
        bit = self._bits.get(replica, 0)
        return [key for key, mask in self._masks.items() if mask & bit]

    def longest_match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `hashes` that each replica holds; replicas that hold none are left out."""
        masks = self._masks
        matched: dict[str, int] = {}
        remaining = masks.get(hashes[0], 0) if hashes else 0
        low = 0  # every replica in `remaining` holds block `low`
        while remaining:
            # The last block that any of the remaining replicas holds.
            first, last = low, len(hashes) - 1
            while first < last:
                middle = (first + last + 1) // 2
                if masks.get(hashes[middle], 0) & remaining:
                    first = middle
                else:
                    last = middle - 1
            deepest = masks.get(hashes[first], 0) & remaining
            for replica, bit in self._bits.items():
                if deepest & bit:
                    matched[replica] = first + 1
            remaining &= ~deepest
        return matched

    def _bit(self, replica: str) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            used = sum(self._bits.values())
            bit = (used + 1) & ~used  # the lowest free bit, so that masks stay short as replicas come and go
            self._bits[replica] = bit
            self._counts[replica] = 0
        return bit

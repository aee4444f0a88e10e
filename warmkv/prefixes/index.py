"""Which replica holds which block, and in which tier: the longest warm prefix of a request, for all replicas at once.

Blocks are known by the first 8 bytes of their hash. Two blocks that are taken for one cost a wrong guess about warmth
and nothing else, for a replica compares whole hashes; among 10 million blocks the chance of any such pair is 3e-6.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

KEY_BYTES = 8
PUBLISH_SECONDS = 0.25  # longest time a replica batches its events, and a router those of all replicas
HEARTBEAT_SECONDS = 1.0  # longest time between two reports of a replica
TIERS = ("device", "host", "disk")  # fastest first
MEND_EVERY = 16  # blocks of a match of which `mend` looks at one
Depths = tuple[int, int, int]
"""Leading blocks held on the device, there or in host memory, in any tier: each number includes the one before."""

# A replica's three bits in the mask of a block: held at all, in host memory or faster, on the device.
_CODES: Mapping[str, int] = {"device": 0b111, "host": 0b011, "disk": 0b001}
_FIELD, _WIDTH = 0b111, 3
_SHARED_MASKS = 1 << 16  # masks kept, more or less, so that blocks held alike share one object
_DECODED_MASKS = 1 << 10  # masks whose replicas are remembered
_NOTHING: Depths = (0, 0, 0)
_SHORT = slice(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `of` parts of all blocks, told apart by the first byte of their hashes."""

    number: int = 0
    of: int = 1

    def owns(self, key: bytes) -> bool:
        return key[0] % self.of == self.number


class PrefixIndex:
    """Block hashes to the replicas that hold them, as one bit mask per block. Not thread-safe.

    Presence is prefix-closed, in every tier and the faster ones together: a replica that holds block i of a chain
    holds blocks 0..i-1 (stores evict the ends of chains first). So the longest match is found by bisection, not by a
    walk over all blocks. Where a block is missing in the middle (damaged on disk, or left out of a full directory) a
    match can come out too long, never too short; `mend` finds that and sets it right.

    Lifetimes run in the replicas, where reads prolong them: what expires there is reported, and removed, like what is
    evicted.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._shifts: dict[str, int] = {}  # replica -> where its bits are
        self._counts: dict[str, int] = {}  # replica -> blocks it holds
        self._shared: dict[int, int] = {}
        self._holders: dict[int, list[tuple[str, int]]] = {}  # replicas and their three bits, of masks seen lately

    def __len__(self) -> int:
        """Return distinct blocks held anywhere."""
        return len(self._masks)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._shifts)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the index takes, keys and masks included, as the allocator rounds them."""
        mask = _allocated(1 << _WIDTH * len(self._shifts))
        shared = sys.getsizeof(self._shared) + len(self._shared) * mask
        return sys.getsizeof(self._masks) + len(self._masks) * _allocated(bytes(KEY_BYTES)) + shared

    def blocks_of(self, replica: str) -> int:
        return self._counts.get(replica, 0)

    def holds(self, replica: str, key: bytes) -> bool:
        return bool(replica in self._shifts and self._masks.get(key[:KEY_BYTES], 0) >> self._shifts[replica] & _FIELD)

    def holders(self, key: bytes) -> list[str]:
        """Return the replicas that hold a block."""
        mask = self._masks.get(key[:KEY_BYTES], 0)
        return [replica for replica, _ in self._holders.get(mask) or self._decode(mask)]

    def add(self, replica: str, keys: Iterable[bytes], tier: str = "device") -> None:
        """Set the fastest `tier` in which a replica holds these blocks; it may have been another before."""
        code = _CODES[tier]
        if replica not in self._shifts:
            taken = set(self._shifts.values())
            free = next(shift for shift in range(0, _WIDTH * len(taken) + 1, _WIDTH) if shift not in taken)
            self._shifts[replica], self._counts[replica] = free, 0
        masks, shared, shift = self._masks, self._pool(), self._shifts[replica]
        field, bits, new = _FIELD << shift, code << shift, 0
        for key in keys:
            key = key[:KEY_BYTES]
            mask = masks.get(key, 0)
            if mask & field != bits:
                new += not mask & field
                mask = mask & ~field | bits
                masks[key] = shared.setdefault(mask, mask)
        self._counts[replica] += new

    def remove(self, replica: str, keys: Iterable[bytes]) -> None:
        """Remove a replica's blocks from the index, whatever their tier."""
        if replica not in self._shifts:
            return
        masks, shared, field, gone = self._masks, self._pool(), _FIELD << self._shifts[replica], 0
        for key in keys:
            key = key[:KEY_BYTES]
            mask = masks.get(key, 0)
            if mask & field:
                gone += 1
                if rest := mask & ~field:
                    masks[key] = shared.setdefault(rest, rest)
                else:
                    del masks[key]
        self._counts[replica] -= gone

    def drop_replica(self, replica: str) -> None:
        """Forget a replica and all that it held. Takes time in the number of blocks."""
        if replica in self._shifts:
            self.remove(replica, self.keys_of(replica))
            del self._shifts[replica], self._counts[replica]
            self._holders.clear()

    def keep(self, wanted: Callable[[bytes], bool]) -> None:
        """Forget all blocks but those whose shortened keys are wanted, and the replicas that hold none then."""
        self._masks = {key: mask for key, mask in self._masks.items() if wanted(key)}
        alike = Counter(self._masks.values())
        for replica, shift in list(self._shifts.items()):
            self._counts[replica] = sum(count for mask, count in alike.items() if mask >> shift & _FIELD)
            if not self._counts[replica]:
                del self._shifts[replica], self._counts[replica]
        self._holders.clear()

    def keys_of(self, replica: str) -> list[bytes]:
        """Return the shortened keys of what a replica holds."""
        if replica not in self._shifts:
            return []
        field = _FIELD << self._shifts[replica]
        return [key for key, mask in self._masks.items() if mask & field]

    def contents(self) -> dict[str, dict[str, list[bytes]]]:
        """Return everything: shortened keys by replica and the fastest tier that has them, in one pass."""
        alike: dict[int, list[bytes]] = {}
        for key, mask in self._masks.items():
            alike.setdefault(mask, []).append(key)
        found: dict[str, dict[str, list[bytes]]] = {replica: {tier: [] for tier in TIERS} for replica in self._shifts}
        for mask, keys in alike.items():
            for replica, shift in self._shifts.items():
                for tier, code in _CODES.items():
                    if mask >> shift & _FIELD == code:
                        found[replica][tier] += keys
        return found

    def longest_match(self, hashes: Sequence[bytes]) -> dict[str, Depths]:
        """Return leading blocks of `hashes` that each replica holds; replicas that hold none are left out.

        All replicas and tiers are bisected together, and apart only where they differ: about log2(n) lookups for
        each depth that occurs.
        """
        get, short = self._masks.get, _SHORT
        first = get(hashes[0][short], 0) if hashes else 0
        found: dict[str, Depths] = {}
        parts = [(first, 1, len(hashes))] if first else []
        while parts:
            bits, low, high = parts.pop()  # each of these bits holds at least the first `low`, at most `high` blocks
            while low < high:
                at = (low + high) >> 1
                deeper = get(hashes[at][short], 0) & bits
                if deeper == bits:
                    low = at + 1
                elif not deeper:
                    high = at
                else:
                    parts.append((bits ^ deeper, low, at))
                    bits, low = deeper, at + 1
            alike = (low, low, low)
            for replica, planes in self._holders.get(bits) or self._decode(bits):
                if planes == _FIELD:
                    found[replica] = alike
                else:
                    device, host, anywhere = found.get(replica, _NOTHING)
                    found[replica] = (
                        low if planes & 0b100 else device,
                        low if planes & 0b010 else host,
                        low if planes & 0b001 else anywhere,
                    )
        return found

    def mend(self, replica: str, matched: Sequence[bytes], start: int) -> int:
        """Look whether a replica holds what it was matched to hold, at every 16th block from number `start` on.

        Returns the leading blocks up to the gap that it found, or all. What lies beyond a gap is of no use to a replica
        and is forgotten; after all 16 starts a chain is matched as it is.
        """
        field = _FIELD << self._shifts[replica] if replica in self._shifts else 0
        for at in range(start, len(matched), MEND_EVERY):
            if not self._masks.get(matched[at][:KEY_BYTES], 0) & field:
                self.remove(replica, matched[at + 1 :])
                return at
        return len(matched)

    def _decode(self, mask: int) -> list[tuple[str, int]]:
        if len(self._holders) >= _DECODED_MASKS:
            self._holders.clear()
        fields = [(replica, mask >> shift & _FIELD) for replica, shift in self._shifts.items()]
        self._holders[mask] = holders = [(replica, planes) for replica, planes in fields if planes]
        return holders

    def _pool(self) -> dict[int, int]:
        """Return masks as shared objects, since there are few masks and many blocks; bounded, for there may be many
        once.
        """
        if len(self._shared) > _SHARED_MASKS:
            self._shared.clear()
        return self._shared


def _allocated(value: object) -> int:
    """Return bytes of a small object; CPython's allocator hands out multiples of 16."""
    return -(-sys.getsizeof(value) // 16) * 16

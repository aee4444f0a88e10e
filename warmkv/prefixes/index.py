"""Which replica holds which block, and in which tier: the longest warm prefix of a request, for all replicas at once.

Blocks are known by the first 8 bytes of their hash. Two blocks that are taken for one cost a wrong guess about warmth
and nothing else, for a replica compares whole hashes; among 10 million blocks the chance of any such pair is 3e-6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warmkv import pickling
from warmkv.prefixes.mask_table import FIELD, KEY_BYTES, WIDTH, Flags, MaskTable, numbers, pack

PUBLISH_SECONDS = 0.25  # longest time a replica batches its events, and a router those of all replicas
HEARTBEAT_SECONDS = 1.0  # longest time between two reports of a replica
TIERS = ("device", "host", "disk")  # fastest first
MEND_EVERY = 16  # blocks of a match of which `mend` looks at one
Depths = tuple[int, int, int]
"""Leading blocks held on the device, there or in host memory, in any tier: each number includes the one before."""

# A replica's three bits in the mask of a block: held at all, in host memory or faster, on the device.
_CODES: Mapping[str, int] = {"device": 0b111, "host": 0b011, "disk": 0b001}
_DECODED_MASKS = 1 << 10  # masks whose replicas are remembered
_NOTHING: Depths = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `of` parts of all blocks, told apart by the first byte of their hashes."""

    number: int = 0
    of: int = 1

    def owns(self, key: bytes) -> bool:
        return key[0] % self.of == self.number

    def part(self, packed: bytes) -> bytes:
        """Return those of packed keys that are its own."""
        if self.of == 1:
            return packed
        keys = numbers(packed)
        part: bytes = keys[(keys & 0xFF) % self.of == self.number].tobytes()
        return part


pickling.by_fields(Shard)  # directories get theirs


class PrefixIndex:
    """Block hashes to the replicas that hold them, as one bit mask per block. Not thread-safe.

    Presence is prefix-closed, in every tier and the faster ones together: a replica that holds block i of a chain
    holds blocks 0..i-1 (stores evict the ends of chains first). So the longest match is found by bisection, not by a
    walk over all blocks. Where a block is missing in the middle (damaged on disk, or left out of a full directory) a
    match can come out too long, never too short; `mend` finds that and sets it right.

    Blocks come and go as packed keys (`mask_table.pack`), 8 bytes each. Lifetimes run in the replicas, where reads
    prolong them: what expires there is reported, and removed, like what is evicted.
    """

    def __init__(self) -> None:
        self._table = MaskTable()
        self._columns: dict[str, int] = {}  # replica -> where its bits are
        self._counts: dict[str, int] = {}  # replica -> blocks it holds
        self._holders: dict[int, list[tuple[str, int]]] = {}  # replicas and their three bits, of masks seen lately

    def __len__(self) -> int:
        """Return distinct blocks held anywhere."""
        return len(self._table)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the index takes, keys and masks included."""
        return self._table.nbytes

    def blocks_of(self, replica: str) -> int:
        return self._counts.get(replica, 0)

    def holds(self, replica: str, packed: bytes) -> Flags:
        """Return for each block whether a replica holds it."""
        if replica not in self._columns:
            return np.zeros(len(packed) // KEY_BYTES, bool)
        return self._table.has(packed, self._columns[replica])

    def holders(self, key: bytes) -> list[str]:
        """Return the replicas that hold a block."""
        mask = self._table.get(key)
        return [replica for replica, _ in self._holders.get(mask) or self._decode(mask)]

    def add(self, replica: str, packed: bytes, tier: str = "device") -> None:
        """Set the fastest `tier` in which a replica holds these blocks; it may have been another before."""
        code = _CODES[tier]
        if replica not in self._columns:
            taken = set(self._columns.values())
            self._columns[replica] = next(at for at in range(len(taken) + 1) if at not in taken)
            self._counts[replica] = 0
            self._holders.clear()
        self._counts[replica] += self._table.assign(packed, self._columns[replica], code)

    def remove(self, replica: str, packed: bytes) -> None:
        """Remove a replica's blocks from the index, whatever their tier."""
        if replica in self._columns:
            self._counts[replica] += self._table.assign(packed, self._columns[replica], 0)

    def drop_replica(self, replica: str) -> None:
        """Forget a replica and all that it held. Takes time in the number of rows."""
        if replica in self._columns:
            self._table.clear(self._columns[replica])
            self._forget(replica)

    def drop_shard(self, shard: Shard) -> None:
        """Forget all blocks of a shard, and the replicas that hold none then."""
        self._table.discard(shard.number, shard.of)
        for replica, column in list(self._columns.items()):
            self._counts[replica] = self._table.count(column)
            if not self._counts[replica]:
                self._forget(replica)

    def _forget(self, replica: str) -> None:
        del self._columns[replica], self._counts[replica]
        self._holders.clear()

    def keys_of(self, replica: str) -> bytes:
        """Return the packed keys of what a replica holds."""
        return self._table.keys(self._columns[replica]) if replica in self._columns else b""

    def contents(self) -> dict[str, dict[str, bytes]]:
        """Return everything: packed keys by replica and the fastest tier that has them."""
        entries = self._table.entries([*self._columns.values()])
        return {
            replica: {tier: keys[codes == _CODES[tier]].tobytes() for tier in TIERS}
            for replica, (keys, codes) in zip(self._columns, entries, strict=True)
        }

    def longest_match(self, hashes: Sequence[bytes]) -> dict[str, Depths]:
        """Return leading blocks of `hashes` that each replica holds; replicas that hold none are left out."""
        found: dict[str, Depths] = {}
        for bits, low in self._table.leading(hashes):
            alike: Any = (low, low, low)  # for compiled code to make the tuple once
            for replica, planes in self._holders.get(bits) or self._decode(bits):
                if planes == FIELD:
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
        field = FIELD << WIDTH * self._columns[replica] if replica in self._columns else 0
        for at in range(start, len(matched), MEND_EVERY):
            if not self._table.get(matched[at]) & field:
                self.remove(replica, pack(matched[at + 1 :]))
                return at
        return len(matched)

    def _decode(self, mask: int) -> list[tuple[str, int]]:
        if len(self._holders) >= _DECODED_MASKS:
            self._holders.clear()
        fields = [(replica, mask >> WIDTH * column & FIELD) for replica, column in self._columns.items()]
        self._holders[mask] = holders = [(replica, planes) for replica, planes in fields if planes]
        return holders

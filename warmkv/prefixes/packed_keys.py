"""Number the keys of prefixes: equal keys have one number, from 0 on, in the order in which they occur first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Packed = NDArray[np.uint64]  # [keys, 2]: the halves of each; those of a trace may have one
Numbers = NDArray[np.int32]

FIRST_SLOTS = 1 << 12
GROWTH = 1.25  # of the room for keys: what is reserved beyond them stays small
_MIX, _SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_FREE = -1


class KeyTable:
    """Number packed keys by a hash table: 16 bytes a key, 8 to 16 for its slots. Thousands are looked up at once."""

    def __init__(self) -> None:
        self._keys: Packed = np.empty((FIRST_SLOTS // 2, 2), dtype=np.uint64)
        self._slots: Numbers = np.full(FIRST_SLOTS, _FREE, dtype=np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def close(self) -> Packed:
        """Return all keys by their numbers. It is the end of the table."""
        self._slots = np.empty(0, dtype=np.int32)
        self._keys.resize((self._count, 2), refcheck=False)
        return self._keys

    def number(self, keys: Packed) -> Numbers:
        """Return the numbers of keys, numbering those that are new."""
        before, every = self._count, self._count + len(keys)
        self._reserve(every)
        self._keys[before:every] = keys  # until it is known which are new
        found, places = self._find(before, every)
        new = np.flatnonzero(found == np.arange(before, every, dtype=np.int32))
        self._count = before + len(new)
        self._keys[before : self._count] = keys[new]
        self._slots[places[new]] = np.arange(before, self._count, dtype=np.int32)
        ranks = np.empty(len(keys), dtype=np.int32)
        ranks[new] = np.arange(before, self._count, dtype=np.int32)
        late = np.flatnonzero(found >= before)
        found[late] = ranks[found[late] - before]
        return found

    def _reserve(self, count: int) -> None:
        """Make room for so many keys; at most half of the slots are taken."""
        if count > len(self._keys):
            self._keys.resize((int(count * GROWTH), 2), refcheck=False)
        if 2 * count > len(self._slots):
            self._slots = np.full(1 << (2 * count - 1).bit_length(), _FREE, dtype=np.int32)
            step = max(FIRST_SLOTS, self._count // 16)  # so that moving them takes little memory
            for first in range(0, self._count, step):
                self._find(first, min(first + step, self._count))

    def _find(self, first: int, end: int) -> tuple[Numbers, NDArray[np.int64]]:
        """Return which key of all so far equals each from number `first` to `end`, by number, and its slot.

        A key that is not in the table yet takes a slot; of equal ones among these the first does.
        """
        keys, wanted = self._keys[first:end], np.arange(first, end, dtype=np.int32)
        mixed = (keys[:, 0] ^ (keys[:, 1] * _SPREAD)) * _MIX
        slots = (mixed >> np.uint64(65 - len(self._slots).bit_length())).astype(np.int64)
        found, places = np.empty_like(wanted), np.empty_like(slots)
        left, mask = np.arange(len(wanted)), len(self._slots) - 1
        while len(left):
            held = self._slots.take(slots)
            free = np.flatnonzero(held == _FREE)
            if len(free):
                # of several that want one slot the last assignment stays
                self._slots[slots[free][::-1]] = wanted[free][::-1]
                held[free] = self._slots[slots[free]]
            equal = self._keys.take(held, axis=0) == keys
            found[left], places[left] = held, slots  # of all; those that are others go on
            other = np.flatnonzero(~(equal[:, 0] & equal[:, 1]))
            left, wanted, keys, slots = left[other], wanted[other], keys[other], (slots[other] + 1) & mask
        return found, places


def unpacked(keys: Packed) -> list[bytes]:
    """Return keys as bytes."""
    found: list[bytes] = np.ascontiguousarray(keys).view(f"V{8 * keys.shape[1]}").reshape(-1).tolist()
    return found


def packed(keys: bytes) -> Packed:
    """Return joined keys as an array, without a copy."""
    return np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)


def ranks(numbers: NDArray[np.integer], chunk: int = 1 << 20) -> Numbers:
    """Return numbers from 0 on, in the order in which they occur first."""
    count, every = int(numbers.max(initial=-1)) + 1, len(numbers)
    first = np.full(count, every, dtype=np.int64 if every > 2**31 - 1 else np.int32)
    for end in range(every, 0, -chunk):  # of several assignments the last one stays
        begin = max(0, end - chunk)
        first[numbers[begin:end][::-1]] = np.arange(end - 1, begin - 1, -1, dtype=first.dtype)
    order = np.argsort(first, kind="stable")
    rank = np.empty(count, dtype=np.int32)
    rank[order] = np.arange(count, dtype=np.int32)
    found: Numbers = rank[numbers]
    return found

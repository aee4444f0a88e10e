"""Map 8-byte keys to a few bits per replica: an open-addressed hash table in one numpy array.

A row is a key and the words of its mask, side by side, so that a look-up costs one cache line. Keys are digests: their
highest bits are their place, and linear probing finds it. Large batches are looked up and inserted by numpy, with as
many rounds as the longest probe has steps, small ones key by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mypy_extensions import i64  # a machine integer where this is compiled; else annotations are not evaluated

KEY_BYTES = 8
WIDTH: Final = 3  # bits of a column
FIELD: Final = (1 << WIDTH) - 1
COLUMNS: Final = 21  # of a word; its highest bit is left over

_TAKEN = 1 << 63  # in the first word of a row that has a key, held or not
_HELD: Final = (1 << 63) - 1
_SMALLEST = 1 << 10  # rows
_FULL = 0.6  # share of the rows that are taken, from which on the table is rebuilt
_ROOM = 0.5  # that are taken after that, at most
_FEW = 32  # keys that are handled one by one
_FORKS: Final = 1 << 10  # first keys of which it is remembered where sequences part
_PIECE = 1 << 16  # keys that are handled at once: bounds what the work takes besides
_TAKEN_WORD = np.uint64(_TAKEN)
_number = Struct("<q").unpack_from  # signed, as `i64` is

Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]
Places = NDArray[np.int64]


def pack(keys: Sequence[bytes]) -> bytes:
    """Join the first 8 bytes of each key. Raises ValueError where one has less."""
    packed = b"".join([key[:KEY_BYTES] for key in keys])
    if len(packed) != KEY_BYTES * len(keys):
        raise ValueError(f"a block's key has at least {KEY_BYTES} bytes")
    return packed


def unpack(packed: bytes) -> list[bytes]:
    """Return the keys that `pack` has joined."""
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def numbers(packed: bytes) -> Words:
    """View packed keys as numbers. Raises ValueError if they are no multiple of 8 bytes."""
    return np.frombuffer(packed, "<u8")


class MaskTable:
    """Map keys to columns of three bits. A key is held while one of its columns is not 0. Not thread-safe.

    A key that is not held any more keeps its row until the table is rebuilt. Takes 16 bytes a row for up to 21 columns,
    8 more for each further 21; there are 1.7 to 4 rows for each that is taken.
    """

    def __init__(self) -> None:
        self._words = 1
        self._forks: dict[bytes, int] = {}  # by first key, how many leading keys most replicas had: a guess
        self._allocate(_SMALLEST)

    def _allocate(self, rows: int) -> None:
        """Start with empty rows, a power of two."""
        self._stride, self._rows = 1 + self._words, rows
        self._cells: Words = np.zeros(rows * self._stride, np.uint64)
        self._view: memoryview[int] = self._cells.data  # its items are read and written as Python's integers
        self._signed_view = cast("memoryview[i64]", self._cells.view(np.int64).data)
        self._shift = 64 - (rows.bit_length() - 1)
        self._top = np.uint64(self._shift)
        self._taken = self._held = 0

    def __len__(self) -> int:
        """Return keys that are held."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        return self._cells.nbytes

    def get(self, key: bytes) -> int:
        """Return the mask of a key, three bits a column; 0 if it is not held. The key may be longer than 8 bytes."""
        view = self._signed_view
        stride: i64 = self._stride
        number: i64 = _number(key)[0]
        at: i64 = (number >> self._shift & self._rows - 1) * stride
        word: i64 = view[at + 1]
        while word and view[at] != number:  # `_probe`, in machine integers
            at += stride
            if at == len(view):
                at = 0
            word = view[at + 1]
        return self._wide(at) if self._words > 1 else word & _HELD

    def leading(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return bits with how many leading keys have them, of those that the first key has.

        Bits are bisected together, and apart only where they differ: about log2(n) look-ups for each depth that occurs.
        Sequences that begin alike often part at the same key, so where the last one did is looked at first. A key that
        has a bit is taken to say that those before it have it as well.
        """
        first = self.get(keys[0]) if keys else 0
        if not first:
            return []
        fork = self._forks.get(keys[0], 0)
        found, parts = [], [(first, 1, len(keys))]
        while parts:
            bits, low, high = parts.pop()  # at least the first `low` keys, at most `high` have each of these bits
            while low < high:
                if low <= fork < high:
                    middle = fork
                elif low < fork == high:
                    middle = fork - 1
                else:
                    middle = (low + high) >> 1
                deeper = self.get(keys[middle]) & bits
                if deeper == bits:
                    low = middle + 1
                elif not deeper:
                    high = middle
                else:
                    parts.append((bits ^ deeper, low, middle))
                    bits, low = deeper, middle + 1
            found.append((bits, low))
        if len(found) > 1 and low != fork:  # the last part is the least deep
            if len(self._forks) >= _FORKS:
                self._forks.clear()
            self._forks[keys[0]] = low
        return found

    def _wide(self, at: int) -> int:
        mask = 0
        for word in range(self._words):
            mask |= (self._view[at + 1 + word] & _HELD) << word * WIDTH * COLUMNS
        return mask

    def assign(self, packed: bytes, column: int, code: int) -> int:
        """Set a column of keys; 0 to take them out.

        Returns by how many more keys it is not 0 now, negative for fewer.
        """
        if column >= self._words * COLUMNS:
            if not code:
                return 0
            self._widen(column // COLUMNS + 1)
        if len(packed) <= _FEW * KEY_BYTES:
            more = self._assign_few(packed, column, code)
        else:
            keys = _distinct(numbers(packed))
            pieces = (keys[start : start + _PIECE] for start in range(0, len(keys), _PIECE))
            more = sum(self._assign_piece(piece, column, code) for piece in pieces)
        self._shrink()
        return more

    def _assign_few(self, packed: bytes, column: int, code: int) -> int:
        if code:
            self._reserve(len(packed) // KEY_BYTES)
        view, stride = self._view, self._stride
        word, field, bits = 1 + column // COLUMNS, FIELD << _shift(column), code << _shift(column)
        more = 0
        for (number,) in _NUMBERS.iter_unpack(packed):
            at = self._probe(number, (number >> self._shift) * stride)
            if not view[at + 1]:
                if not code:
                    continue
                view[at], view[at + 1] = number, _TAKEN
                self._taken += 1
            before = view[at + word]
            if before & field == bits:
                continue
            held = self._wide(at) if stride > 2 else before & _HELD
            view[at + word] = before & ~field | bits
            if not before & field:
                more += 1
                self._held += not held
            elif not code:
                more -= 1
                self._held -= not (self._wide(at) if stride > 2 else before & ~field & _HELD)
        return more

    def _assign_piece(self, keys: Words, column: int, code: int) -> int:
        """Set a column of distinct keys."""
        if code:
            if self._lacks(len(keys)):
                self._reserve(int(np.count_nonzero(self._find(keys) < 0)))
            rows = self._claim(keys)
        else:
            rows = self._find(keys)
            rows = rows[rows >= 0]
        cells, at = self._cells, rows * self._stride + (1 + column // COLUMNS)
        field, bits = np.uint64(FIELD << _shift(column)), np.uint64(code << _shift(column))
        before = cells[at]
        rest = before & ~field
        had = np.count_nonzero(before != rest)
        cells[at] = rest | bits
        alone = (rest & np.uint64(_HELD)) == 0  # held by nobody else
        for word in range(1, 1 + self._words):
            if word != 1 + column // COLUMNS:
                alone &= (cells[rows * self._stride + word] & np.uint64(_HELD)) == 0
        if code:
            self._held += int(np.count_nonzero(alone & (before == rest)))
            return int(len(rows) - had)
        self._held -= int(np.count_nonzero(alone & (before != rest)))
        return -int(had)

    def has(self, packed: bytes, column: int) -> Flags:
        """Return for each key whether its column is not 0."""
        rows = self._find(numbers(packed))
        found = rows >= 0
        if column >= self._words * COLUMNS:
            return np.zeros(len(rows), bool)
        words = self._cells[np.where(found, rows, 0) * self._stride + (1 + column // COLUMNS)]
        held: Flags = (words & np.uint64(FIELD << _shift(column))) != 0
        return found & held

    # --- all rows

    def keys(self, column: int) -> bytes:
        """Return the packed keys of which a column is not 0."""
        if column >= self._words * COLUMNS:
            return b""
        packed: bytes = self._table()[self._column(column) != 0, 0].tobytes()
        return packed

    def entries(self, columns: Sequence[int]) -> list[tuple[Words, Words]]:
        """Return for each column the keys of which it is not 0, and its codes. Reads each word of the rows once."""
        found, words = [], dict[int, tuple[Words, Words]]()
        for column in columns:
            word = column // COLUMNS
            if word not in words:
                words[word] = self._word(word)
            keys, masks = words[word]
            codes = masks >> np.uint64(_shift(column)) & np.uint64(FIELD)
            held = codes != 0
            found.append((keys[held], codes[held]))
        return found

    def _word(self, word: int) -> tuple[Words, Words]:
        """Return the keys of which a word of the mask is not 0, and these words."""
        if word >= self._words:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        table = self._table()
        masks = table[:, 1 + word] & np.uint64(_HELD)
        rows = np.flatnonzero(masks)
        return table[rows, 0], masks[rows]

    def count(self, column: int) -> int:
        """Count the keys of which a column is not 0."""
        return int(np.count_nonzero(self._column(column))) if column < self._words * COLUMNS else 0

    def clear(self, column: int) -> None:
        """Set a column to 0 throughout."""
        if column < self._words * COLUMNS:
            table, word, field = self._table(), 1 + column // COLUMNS, np.uint64(FIELD << _shift(column))
            rows = np.flatnonzero(table[:, word] & field)
            table[rows, word] &= ~field
            self._held -= len(rows) - int(np.count_nonzero(_held(table[rows])))
            self._shrink()

    def discard(self, remainder: int, divisor: int) -> None:
        """Let go of all keys whose first byte has that remainder."""
        table = self._table()
        gone = (table[:, 0] & np.uint64(0xFF)) % np.uint64(divisor) == remainder
        table[gone, 1] &= np.uint64(_TAKEN)
        table[gone, 2:] = 0
        self._rebuild(0)

    def _table(self) -> Words:
        return self._cells.reshape(self._rows, self._stride)

    def _column(self, column: int) -> Words:
        return self._table()[:, 1 + column // COLUMNS] >> np.uint64(_shift(column)) & np.uint64(FIELD)

    # --- probing

    def _find(self, keys: Words) -> Places:
        """Return the rows of keys; -1 where there is none."""
        found = np.full(len(keys), -1, np.int64)
        left, cells, stride = np.arange(len(keys)), self._cells, self._stride
        rows = (keys >> self._top).astype(np.int64)
        while len(left) > _FEW:
            at = rows * stride
            taken = cells[at + 1] != 0
            here = cells[at] == keys
            here &= taken
            found[left[here]] = rows[here]
            on = taken ^ here
            left, keys, rows = left[on], keys[on], rows[on] + 1 & self._rows - 1
        for place, number, row in zip(left.tolist(), keys.tolist(), rows.tolist(), strict=True):
            end = self._probe(number, row * stride)
            if self._view[end + 1]:
                found[place] = end // stride
        return found

    def _claim(self, keys: Words) -> Places:
        """Return the rows of distinct keys, taking one for each that has none. There must be room."""
        found = np.empty(len(keys), np.int64)
        left, cells, stride, taken = np.arange(len(keys)), self._cells, self._stride, 0
        rows = (keys >> self._top).astype(np.int64)
        while len(left) > _FEW:
            at = rows * stride
            free = cells[at + 1] == 0
            wanted = at[free]
            cells[wanted] = keys[free]  # of several that want a row, one gets it, and the others go on
            cells[wanted + 1] = _TAKEN_WORD
            here = cells[at] == keys
            taken += int(np.count_nonzero(here & free))
            found[left[here]] = rows[here]
            on = ~here
            left, keys, rows = left[on], keys[on], rows[on] + 1 & self._rows - 1
        for place, number, row in zip(left.tolist(), keys.tolist(), rows.tolist(), strict=True):
            end = self._probe(number, row * stride)
            if not self._view[end + 1]:
                self._view[end], self._view[end + 1] = number, _TAKEN
                taken += 1
            found[place] = end // stride
        self._taken += taken
        return found

    def _probe(self, number: int, at: int) -> int:
        """Return where the row of a key is, or the first free one, from a place on."""
        view, stride = self._view, self._stride
        while view[at] != number and view[at + 1]:
            at += stride
            if at == len(view):
                at = 0
        return at

    # --- size

    def _reserve(self, keys: int) -> None:
        """Make room for more keys."""
        if self._lacks(keys):
            self._rebuild(keys)

    def _lacks(self, keys: int) -> bool:
        return self._taken + keys > _FULL * self._rows

    def _shrink(self) -> None:
        """Give rows back once most are of keys that are not held any more."""
        if self._taken > _SMALLEST + 4 * self._held:
            self._rebuild(0)

    def _widen(self, words: int) -> None:
        self._words = words
        self._rebuild(0)

    def _rebuild(self, more: int) -> None:
        """Take the keys that are held to new rows, with room for more of them."""
        table = self._table()
        kept = table[_held(table)]
        rows = _SMALLEST
        while len(kept) + more > _ROOM * rows:
            rows *= 2
        self._allocate(rows)
        for start in range(0, len(kept), _PIECE):
            piece = kept[start : start + _PIECE]
            at = self._claim(np.ascontiguousarray(piece[:, 0])) * self._stride
            for word in range(1, piece.shape[1]):
                self._cells[at + word] = piece[:, word]
        self._held = len(kept)


_NUMBERS = Struct("<Q")


def _held(table: Words) -> Flags:
    """Return for each row of a table whether its key is held."""
    held: Flags = (table[:, 1] & np.uint64(_HELD)) != 0
    if table.shape[1] > 2:
        held |= table[:, 2:].any(axis=1)
    return held


def _distinct(keys: Words) -> Words:
    """Return each key once, in the order of their places in a table."""
    keys = np.sort(keys)
    again = keys[1:] == keys[:-1]
    return np.concatenate([keys[:1], keys[1:][~again]]) if again.any() else keys


def _shift(column: int) -> int:
    """Return where the bits of a column are in their word."""
    return WIDTH * (column % COLUMNS)

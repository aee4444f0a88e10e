"""Pack the block hashes of many prompts: each distinct one once, and four bytes for each block.

Keys are collected in pages. A full page numbers its keys, and `number` gives those of all pages common numbers, so
that prompts with equal keys have equal numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.hashing import DIGEST_BYTES

PAGE = 1 << 18  # keys
Ints = NDArray[np.int64]


class Page:
    """Store keys one after the other, as they are or, once `close` was called, as numbers of distinct keys."""

    __slots__ = ("_distinct", "_numbers", "_packed")

    def __init__(self) -> None:
        self._packed = bytearray()
        self._distinct, self._numbers = b"", array("i")

    @property
    def is_full(self) -> bool:
        """Return True if the next keys belong into another page."""
        return bool(self._numbers) or len(self._packed) >= PAGE * DIGEST_BYTES

    def add(self, packed: bytes) -> Keys:
        """Add the keys of a prompt."""
        start = len(self._packed) // DIGEST_BYTES
        self._packed += packed
        return Keys(self, start, start + len(packed) // DIGEST_BYTES)

    def close(self) -> None:
        """Replace the keys by their numbers; none can be added any more."""
        if self._packed:
            self._distinct, numbers = distinct(self._packed)
            self._numbers, self._packed = array("i", numbers.astype(np.int32).tobytes()), bytearray()

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return keys by their places."""
        size = DIGEST_BYTES
        if self._packed:
            packed = bytes(self._packed[start * size : stop * size])
            return [packed[at : at + size] for at in range(0, len(packed), size)]
        keys = self._distinct
        return [keys[at * size : at * size + size] for at in self._numbers[start:stop]]

    def numbers(self, start: int, stop: int) -> array[int]:
        """Return numbers of keys by their places; the page is closed."""
        return self._numbers[start:stop]

    @staticmethod
    def join(pages: Sequence[Page]) -> None:
        """Close pages, and give their keys common numbers."""
        for page in pages:
            page.close()
        if len({id(page._distinct) for page in pages}) > 1:
            known, numbers = distinct(b"".join([page._distinct for page in pages]))
            numbers, start = numbers.astype(np.int32), 0
            for page in pages:
                count = len(page._distinct) // DIGEST_BYTES
                own = numbers[start : start + count]
                page._numbers = array("i", own[np.frombuffer(page._numbers, np.int32)].tobytes())
                page._distinct, start = known, start + count


class Keys(Sequence[bytes]):
    """View the keys of a prompt in a page; equal to any sequence of the same keys."""

    __slots__ = ("_page", "_start", "_stop")

    def __init__(self, page: Page, start: int, stop: int) -> None:
        self._page, self._start, self._stop = page, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._page.read(self._start, self._stop))

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, at: int | slice) -> bytes | tuple[bytes, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        place = at + (self._start if at >= 0 else self._stop)
        if not self._start <= place < self._stop:
            raise IndexError(at)
        return self._page.read(place, place + 1)[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # without the page, which has the keys of others

    @property
    def page(self) -> Page:
        return self._page

    @property
    def numbers(self) -> array[int]:
        """Return the numbers that `number` has given the keys."""
        return self._page.numbers(self._start, self._stop)


def number(chains: Iterable[Sequence[bytes]]) -> None:
    """Give the keys of all packed chains common numbers."""
    Page.join(list({id(chain.page): chain.page for chain in chains if isinstance(chain, Keys)}.values()))


def numbers_of(chains: Sequence[Sequence[bytes]]) -> Ints:
    """Return a number for each key of all chains: from 0 on, in the order in which they occur first."""
    if all(isinstance(chain, Keys) for chain in chains):
        number(chains)
        found = np.frombuffer(b"".join([chain.numbers for chain in chains if isinstance(chain, Keys)]), np.int32)
        first = np.full(found.max(initial=-1) + 1, len(found))
        first[found[::-1]] = np.arange(len(found))[::-1]  # of several the last one stays
        return _ranks(first)[found]
    every = [key for chain in chains for key in chain]
    known = {key: at for at, key in enumerate(dict.fromkeys(every))}
    return np.array([known[key] for key in every], dtype=np.int64)


def distinct(packed: bytes | bytearray) -> tuple[bytes, Ints]:
    """Return the distinct keys and each key's place among them, in the order in which they occur first."""
    halves = np.frombuffer(packed, np.uint64).reshape(-1, 2)
    head, rest = np.ascontiguousarray(halves[:, 0]), halves[:, 1]
    order = np.argsort(head, kind="stable")
    new, other = _differs(head[order]), _differs(rest[order])
    if (other & ~new).any():  # keys of which only the second halves differ
        order = np.lexsort((rest, head))
        new = _differs(head[order]) | _differs(rest[order])
    first = order[new]
    ranks = _ranks(first)
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = ranks[new.cumsum() - 1]
    return halves[np.sort(first)].tobytes(), numbers


def _differs(values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return True where a value is not the one before it."""
    found = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=found[1:])
    return found


def _ranks(values: Ints) -> Ints:
    """Return the place of each value in the sorted order."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values)] = np.arange(len(values))
    return ranks

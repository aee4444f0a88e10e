"""Which marked prefixes are touched so that an engine that evicts by recency keeps them for their TTL.

A touch is a request for the prefix alone, which makes its blocks the most recently used ones. It is due when new blocks
have taken half of the room that running requests leave.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Named = TypeVar("Named", bound=Hashable)

MARGIN = 0.5
"""Share of the room that new blocks take until a touch is due. Partial ones are not counted, and a touch must wait."""


@dataclass(frozen=True, slots=True)
class KeptPrefix(Generic[Key, Named]):
    """Name the whole blocks before a mark by the engine's keys; `token_ids` are theirs and one more, to ask for all."""

    mark: Named
    root: bytes
    chain: tuple[Key, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Kept(Generic[Key, Named]):
    prefix: KeptPrefix[Key, Named]
    used: int  # blocks that the engine had stored when it used this prefix last


class KeepWarm(Generic[Key, Named]):
    """Choose which prefixes are kept warm: at most `limit` distinct blocks, those that requests used last.

    `stored` always counts the blocks that the engine has stored so far.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Named, _Kept[Key, Named]] = OrderedDict()  # by mark; least recently used first
        self._ends: dict[Key, dict[Named, None]] = {}  # marks by the last block before them
        self._blocks: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def blocks(self) -> int:
        """Return how many distinct blocks are kept."""
        return len(self._blocks)

    def keep(self, prefix: KeptPrefix[Key, Named], stored: int) -> None:
        """Keep a prefix that was used now; others give way to it. One that exceeds the limit is not kept."""
        self.forget(prefix.mark)
        if not 0 < len(prefix.chain) <= self._limit:
            return
        self._kept[prefix.mark] = _Kept(prefix, stored)
        self._ends.setdefault(prefix.chain[-1], {})[prefix.mark] = None
        self._blocks.update(prefix.chain)
        while len(self._blocks) > self._limit:
            self.forget(next(iter(self._kept)))

    def used(self, chain: Sequence[Key], stored: int) -> None:
        """Take note that the engine used these blocks now."""
        for key in chain:
            for mark in self._ends.get(key, ()):
                self._kept[mark].used = stored
                self._kept.move_to_end(mark)

    def forget(self, mark: Named) -> None:
        """Keep a prefix no longer."""
        if (kept := self._kept.pop(mark, None)) is None:
            return
        chain = kept.prefix.chain
        self._ends[chain[-1]].pop(mark)
        if not self._ends[chain[-1]]:
            del self._ends[chain[-1]]
        self._blocks.subtract(chain)
        for key in chain:
            if not self._blocks[key]:
                del self._blocks[key]

    def due(
        self, stored: int, room: int, alive: Callable[[KeptPrefix[Key, Named]], bool]
    ) -> KeptPrefix[Key, Named] | None:
        """Return the prefix to touch now, and take it as used; None if none is due.

        `room` are the blocks of the engine that no running request uses. What is not `alive` is forgotten.
        """
        longest: tuple[int, Named] | None = None
        for mark, kept in list(self._kept.items()):
            chain = kept.prefix.chain
            if stored - kept.used <= MARGIN * max(0, room - len(chain)):
                continue
            if not alive(kept.prefix):
                self.forget(mark)
            elif longest is None or len(chain) > longest[0]:
                longest = len(chain), mark
        if longest is None:
            return None
        prefix = self._kept[longest[1]].prefix
        for key in prefix.chain:
            for mark in self._ends.get(key, ()):
                self._kept[mark].used = stored
        return prefix

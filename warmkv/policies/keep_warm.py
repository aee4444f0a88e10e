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
    """Name the whole blocks before a mark by the engine's keys; `token_ids` are theirs and one more, to ask for all.

    `ttl` is the mark's: of those with one TTL behind the same blocks the last is kept: it outlives those not read.
    """

    mark: Named
    root: bytes
    chain: tuple[Key, ...]
    token_ids: tuple[int, ...]
    ttl: str = ""

    @property
    def place(self) -> tuple[Key, str]:
        """Return what one prefix is kept for: its last block, and the TTL."""
        return self.chain[-1], self.ttl


@dataclass(slots=True)
class _Kept(Generic[Key, Named]):
    prefix: KeptPrefix[Key, Named]
    used: int  # blocks that the engine had stored when it used this prefix last


class KeepWarm(Generic[Key, Named]):
    """Choose which prefixes are kept warm: at most `limit` distinct blocks, those that requests used last.

    `stored` always counts the blocks that the engine has stored so far.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[tuple[Key, str], _Kept[Key, Named]] = OrderedDict()  # least recently used first
        self._ends: dict[Key, dict[str, None]] = {}  # TTLs of those that are kept, by their last block
        self._blocks: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def blocks(self) -> int:
        """Return how many distinct blocks are kept."""
        return len(self._blocks)

    def keep(self, prefix: KeptPrefix[Key, Named], stored: int) -> None:
        """Keep a prefix that was used now; others give way to it. One that exceeds the limit is not kept."""
        if not 0 < len(prefix.chain) <= self.limit:
            return
        self.forget(prefix)
        self._kept[prefix.place] = _Kept(prefix, stored)
        self._ends.setdefault(prefix.chain[-1], {})[prefix.ttl] = None
        self._blocks.update(prefix.chain)
        while len(self._blocks) > self.limit:
            self.forget(next(iter(self._kept.values())).prefix)

    def used(self, chain: Sequence[Key], stored: int) -> None:
        """Take note that the engine used these blocks now."""
        for key in chain:
            for ttl in self._ends.get(key, ()):
                self._kept[key, ttl].used = stored
                self._kept.move_to_end((key, ttl))

    def forget(self, prefix: KeptPrefix[Key, Named]) -> None:
        """Keep a prefix no longer, nor another one in its place."""
        if (kept := self._kept.pop(prefix.place, None)) is None:
            return
        chain = kept.prefix.chain
        self._ends[chain[-1]].pop(prefix.ttl)
        if not self._ends[chain[-1]]:
            del self._ends[chain[-1]]
        self._blocks.subtract(chain)
        for key in chain:
            if not self._blocks[key]:
                del self._blocks[key]

    def due(
        self,
        stored: int,
        room: int,
        alive: Callable[[KeptPrefix[Key, Named]], bool],
        held: Callable[[KeptPrefix[Key, Named]], bool],
    ) -> KeptPrefix[Key, Named] | None:
        """Return the prefix to touch now, and take it as used; None if none is due.

        `room` are the blocks of the engine that no running request uses. Prefixes whose marks are not `alive` are
        forgotten, also those that others use, and of those that would be due the ones whose blocks are not `held`.
        """
        longest: KeptPrefix[Key, Named] | None = None
        for kept in list(self._kept.values()):
            prefix, chain = kept.prefix, kept.prefix.chain
            if not alive(prefix):
                self.forget(prefix)
            elif stored - kept.used <= MARGIN * max(0, room - len(chain)):
                continue
            elif not held(prefix):
                self.forget(prefix)
            elif longest is None or len(chain) > len(longest.chain):
                longest = prefix
        if longest is not None:
            for key in longest.chain:
                for ttl in self._ends.get(key, ()):
                    self._kept[key, ttl].used = stored
        return longest

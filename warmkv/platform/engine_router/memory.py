"""What a server is taken to hold by what it was sent, where it does not tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class EngineMemory:
    """Remember the blocks that a server was sent: at most `blocks`, each for `ttl` seconds after its last use."""

    def __init__(self, blocks: int, ttl: float, clock: Callable[[], float]) -> None:
        self._blocks, self._ttl, self._clock = blocks, ttl, clock
        self._expires: OrderedDict[bytes, float] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._expires)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks of a prompt that are held. Ends of chains leave first, so a bisection finds it."""
        now, low, high = self._clock(), 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if self._expires.get(hashes[middle - 1], now) > now:
                low = middle
            else:
                high = middle - 1
        return low

    def use(self, hashes: Sequence[bytes]) -> None:
        """Take a prompt's blocks as used now."""
        expires = self._clock() + self._ttl
        for key in reversed(hashes):
            self._expires[key] = expires
            self._expires.move_to_end(key)
        while len(self._expires) > self._blocks:
            self._expires.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the server was away, and may have begun anew."""
        self._expires.clear()

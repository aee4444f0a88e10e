"""Prefixes that replicas are about to hold, or hold without the index telling so yet: those that a router sent.

Until a prompt is computed no index tells of it. Without this, requests that come together with a new prefix would
compute it on as many replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import islice

MOST = 8
"""Requests that a look-up compares with, the latest ones: it stays as fast however many are in flight."""

_POWERS = tuple(1 << power for power in range(64))


class InFlightPrefixes:
    """Chains of blocks by request. They are found by their blocks number 1, 2, 4, 8 and so on."""

    def __init__(self) -> None:
        self._chains: dict[Hashable, tuple[str, Sequence[Hashable], int, int]] = {}
        """request -> (replica, hashes of its prompt, first block that is new there, those that it leaves there)"""
        self._requests: dict[Hashable, dict[Hashable, None]] = {}  # by block, in the order in which they came

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, request: Hashable, replica: str, hashes: Sequence[Hashable], known: int, leaves: int) -> None:
        """Add a request that leaves the first `leaves` blocks of its prompt on a replica, which has `known` of them."""
        if request in self._chains:
            self.remove(request)
        if leaves > known:
            self._chains[request] = (replica, hashes, known, leaves)
            for at in _places(known, leaves):
                self._requests.setdefault(hashes[at - 1], {})[request] = None

    def move(self, request: Hashable, replica: str) -> None:
        """Note that another replica computes all of it."""
        if (chain := self._chains.get(request)) is not None:
            _, hashes, _, leaves = chain
            self.add(request, replica, hashes, 0, leaves)

    def remove(self, request: Hashable) -> None:
        """Forget a request."""
        if request in self._chains:
            _, hashes, known, leaves = self._chains.pop(request)
            for at in _places(known, leaves):
                requests = self._requests[hashes[at - 1]]
                del requests[request]
                if not requests:
                    del self._requests[hashes[at - 1]]

    def drop(self, replica: str) -> None:
        """Forget what a replica was about to hold."""
        for request in [request for request, chain in self._chains.items() if chain[0] == replica]:
            self.remove(request)

    def depths(self, hashes: Sequence[Hashable], known: int) -> dict[str, int]:
        """Return leading blocks of a prompt that replicas are about to hold, where they are more than `known`.

        Of replicas that are about to hold much less than another one, not all are found.
        """
        found: dict[str, int] = {}
        if not self._requests:
            return found
        for at in reversed(_places(known, len(hashes))):
            requests = self._requests.get(hashes[at - 1])
            if requests is None:
                continue
            for request in islice(reversed(requests), MOST):
                replica, chain, _, leaves = self._chains[request]
                depth = _alike(chain, hashes, at, min(leaves, len(hashes)))
                if depth > found.get(replica, known):
                    found[replica] = depth
            if found:
                break
        return found


def _alike(chain: Sequence[Hashable], hashes: Sequence[Hashable], least: int, most: int) -> int:
    """Return how many blocks of two chains are the same, from `least` to `most`: one block tells of all before it."""
    return least + bisect_left(range(least, most), True, key=lambda block: chain[block] != hashes[block])


def _places(known: int, blocks: int) -> tuple[int, ...]:
    """Return powers of two above `known`, up to `blocks`."""
    return _POWERS[known.bit_length() : blocks.bit_length()]

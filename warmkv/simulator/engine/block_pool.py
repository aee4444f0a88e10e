"""Simulate vLLM's block pool: running requests and the prefixes of those that ended share one set of blocks.

A free block keeps its content until it is taken: first those without any, then those that were released first, of a
request the last ones first. Only full blocks have a content that is found, and never all of a prompt: vLLM computes the
last token anew, and with it the whole block that it is in. (cf. `vllm/v1/core/block_pool.py`)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from warmkv.simulator.engine.kv_blocks import KVBlocks, Request


class _Block:
    """Hold one block's content; without `users` it is free."""

    __slots__ = ("key", "users")

    def __init__(self, key: Hashable) -> None:
        self.key, self.users = key, 1


class BlockPool(KVBlocks[Request]):
    """Allocate blocks of `size` tokens and find them by content.

    `keys` returns names of the leading full blocks of a request, which tell equal prefixes; those behind them can be
    found by the request alone, if it is preempted. `evicted` is told of names that no block has any more.
    """

    def __init__(
        self,
        blocks: int,
        size: int,
        keys: Callable[[Request], Sequence[Hashable]],
        evicted: Callable[[Hashable], None],
    ) -> None:
        super().__init__(blocks, size)
        self.size = size
        self.stored = 0  # full blocks that were computed so far
        self._keys, self._evicted = keys, evicted
        self._empty = blocks  # of the free ones, those without content
        self._released: OrderedDict[_Block, None] = OrderedDict()  # the others, which are taken from the front
        self._copies: dict[Hashable, list[_Block]] = {}  # the first one is found
        self._tables: dict[Request, list[_Block]] = {}  # full blocks of running requests

    def fill(self, keys: Sequence[Hashable]) -> None:
        """Let empty blocks have contents that were released in this order, the last ones if there are too many."""
        excess = max(0, len(keys) - self._empty)
        for key in keys[:excess]:
            self._evicted(key)
        for key in keys[excess:]:
            block = _Block(key)
            block.users = 0
            self._released[block] = None
            self._copies[key] = [block]
            self._empty -= 1

    def found(self, request: Request) -> int:
        """Return the tokens of a request that is to begin whose KV is there."""
        return len(self._hits(request)) * self._size

    def holds(self, key: Hashable) -> bool:
        """Return True if a block has that content."""
        return key in self._copies

    def fit(self, request: Request) -> bool:
        """Return True if there are blocks for all tokens of a request that holds none, beside what it finds."""
        hits = self._hits(request)
        busy = sum(block.users > 0 for block in hits)
        return self._of(request.prompt + request.num_output_tokens) - busy <= self.free

    def begin(self, request: Request) -> None:
        """Hold the blocks that a request finds."""
        hits = self._tables[request] = self._hits(request)
        for block in hits:
            if not block.users:
                del self._released[block]
                self.free -= 1
            block.users += 1

    def extend(self, request: Request, end: int) -> bool:
        """Extend a request to `end` tokens, whose full blocks are found from now on; False if there are none free."""
        if not super().extend(request, end):
            return False
        self._name(request, end)
        return True

    def release(self, request: Request) -> None:
        """Give back the blocks of a request, which keep their content."""
        self._name(request, request.computed)
        table = self._tables.pop(request)
        partial = self._of(request.computed) - len(table)
        self._empty += partial
        self.free += partial
        for block in reversed(table):
            block.users -= 1
            if not block.users:
                self._released[block] = None
                self.free += 1

    def exhaust(self) -> None:
        """Empty all free blocks: those admitted before the one that is preempted next took them."""
        self._empty_released(len(self._released))
        self._empty = self.free

    def _take(self, blocks: int) -> None:
        super()._take(blocks)
        empty = min(blocks, self._empty)
        self._empty -= empty
        self._empty_released(blocks - empty)

    def _empty_released(self, blocks: int) -> None:
        for _ in range(blocks):
            block, _ = self._released.popitem(last=False)
            copies = self._copies[block.key]
            copies.remove(block)
            if not copies:
                del self._copies[block.key]
                self._evicted(block.key)

    def _hits(self, request: Request) -> list[_Block]:
        keys, hits = self._keys(request), list[_Block]()
        for at in range((request.prompt + request.num_output_tokens - 1) // self._size):
            copies = self._copies.get(keys[at] if at < len(keys) else (request, at))
            if copies is None:
                break
            hits.append(copies[0])
        return hits

    def _name(self, request: Request, end: int) -> None:
        """Name the full blocks of a request up to `end` tokens."""
        keys, table = self._keys(request), self._tables[request]
        self.stored += max(0, end // self._size - len(table))
        for at in range(len(table), end // self._size):
            key = keys[at] if at < len(keys) else (request, at)
            table.append(_Block(key))
            self._copies.setdefault(key, []).append(table[-1])

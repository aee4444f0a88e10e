"""The prefixes a replica keeps warm: uncompressed KV blocks in memory, under their chained hashes.

`policies/prefix_cache.py` decides what is found, kept and given up; the bytes are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from warmkv.config import PrefixCacheConfig
from warmkv.policies.budgets import KVShape
from warmkv.policies.prefix_cache import Lifetimes, Match, PrefixCache
from warmkv.prefixes.record import Candidate, Mark


class BlockStore:
    """Blocks of one replica. Not thread-safe: the engine's thread owns it.

    `publish(stored, evicted)` is told of every change of the full blocks that are resident, what left before what came.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        shape: KVShape,
        clock: Callable[[], float],
        publish: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda stored, evicted: None,
    ) -> None:
        self._size, self._clock, self._publish = config.block_size, clock, publish
        self._cache: PrefixCache | None = None
        if config.enabled:
            self._cache = PrefixCache(config.memory_bytes, shape.token_bytes, Lifetimes.of(config))
        self._blocks: dict[bytes, Tensor] = {}  # [2, layers, kv_heads, tokens, head_dim]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def resident_bytes(self) -> int:
        return self._cache.ledger.bytes if self._cache else 0

    def full_blocks(self) -> list[bytes]:
        """Keys of the resident full blocks, for a snapshot."""
        return [key for key, block in self._blocks.items() if block.shape[3] == self._size]

    def match(self, hashes: Sequence[bytes], reads: Sequence[Candidate]) -> Match:
        """Find the longest stored prefix of a prompt and pin it; `reads` are breakpoints, highest first."""
        return self._cache.match(hashes, reads, self._size, self._clock()) if self._cache else Match()

    def attach(self, match: Match, tokens: int, keys: Tensor, values: Tensor) -> None:
        """Copy the first `tokens` tokens of a match into a prompt's workspace [layers, kv_heads, T, head_dim]."""
        start = 0
        for key in match.chain:
            if start >= tokens:
                break
            block = self._blocks[key]
            end = min(start + block.shape[3], tokens)
            keys[:, :, start:end] = block[0, :, :, : end - start]
            values[:, :, start:end] = block[1, :, :, : end - start]
            start = end

    def release(self, match: Match) -> None:
        if self._cache:
            self._cache.release(match)

    def store(self, hashes: Sequence[bytes], marks: Sequence[Mark], keys: Tensor, values: Tensor) -> int:
        """Keep a computed prompt: keys, values [layers, kv_heads, T, head_dim] of all its tokens, uncompressed.

        Returns the position of the highest mark that is stored now, 0 if none is: memory may not suffice for all.
        """
        if not self._cache:
            return 0
        for change in self._cache.store(hashes, marks, self._size, self._clock()):
            gone = self._remove(change.evicted)
            try:
                for span in change.stored:
                    at = slice(span.start, span.end)
                    self._blocks[span.key] = torch.stack([keys[:, :, at], values[:, :, at]])
            except Exception:  # out of memory, say: the ledger must not promise what is not there
                self._cache.ledger.discard([span.key for span in change.stored if span.key not in self._blocks])
                raise
            finally:
                held = [span for span in change.stored if span.key in self._blocks]
                self._tell([span.key for span in held if span.end - span.start == self._size], gone)
        return self._cache.highest_mark(marks, self._clock())

    def expire(self) -> None:
        """Drop what has outlived its TTL."""
        if self._cache:
            self._tell([], self._remove(self._cache.ledger.expire(self._clock())))

    def _remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """Free the blocks of some keys; the keys of full blocks among them."""
        return [key for key in keys if self._blocks.pop(key).shape[3] == self._size]

    def _tell(self, stored: Sequence[bytes], gone: Sequence[bytes]) -> None:
        if stored or gone:
            self._publish(stored, gone)

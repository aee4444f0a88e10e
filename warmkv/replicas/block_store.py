"""The prefixes a replica keeps warm: uncompressed KV blocks in memory, under their chained hashes.

`policies/prefix_cache.py` decides what is found, kept and given up; the bytes are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from warmkv.config import PrefixCacheConfig
from warmkv.policies.prefix_cache import Lifetimes, Match, PrefixCache
from warmkv.policies.slot_sizes import KVShape
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
        self.enabled, self.block_size, self._clock, self._publish = config.enabled, config.block_size, clock, publish
        self._cache: PrefixCache | None = None
        if config.enabled:
            self._cache = PrefixCache(config.memory_bytes, shape.token_bytes, Lifetimes.of(config))
        self._blocks: dict[bytes, Tensor] = {}  # [2, layers, kv_heads, tokens, head_dim]
        self._sums: dict[bytes, Tensor] = {}  # column sums [layers, kv_heads, tokens] by prefix

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def resident_bytes(self) -> int:
        return self._cache.ledger.bytes if self._cache else 0

    def full_blocks(self) -> list[bytes]:
        """Keys of the resident full blocks, for a snapshot."""
        return [key for key, block in self._blocks.items() if block.shape[3] == self.block_size]

    def match(self, hashes: Sequence[bytes], reads: Sequence[Candidate]) -> Match:
        """Find the longest stored prefix of a prompt and pin it; `reads` are breakpoints, highest first."""
        return self._cache.match(hashes, reads, self.block_size, self._clock()) if self._cache else Match()

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

    def column_sums(self, match: Match, most: int) -> tuple[int, Tensor | None]:
        """The longest part of a match within `most` tokens whose column sums are stored, and these; (0, None) if none.

        They are what the part's own queries gave each of its tokens: [layers, kv_heads, tokens].
        """
        if not self._cache:
            return 0, None
        tokens, key = self._cache.match_sums(match, self.block_size, most, self._clock())
        return tokens, self._sums.get(key)

    def release(self, match: Match) -> None:
        if self._cache:
            self._cache.release(match)

    def store(
        self,
        hashes: Sequence[bytes],
        marks: Sequence[Mark],
        keys: Tensor,
        values: Tensor,
        column_sums: Mapping[int, Tensor] | None = None,
    ) -> int:
        """Keep a computed prompt: keys, values [layers, kv_heads, T, head_dim] of all its tokens, uncompressed.

        `column_sums` [layers, kv_heads, n] are kept for the first n tokens where their KV is.

        Returns the position of the highest mark that is stored now, 0 if none is: memory may not suffice for all.
        """
        if not self._cache:
            return 0
        for change in self._cache.store(hashes, marks, self.block_size, self._clock()):
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
                self._tell([span.key for span in held if span.end - span.start == self.block_size], gone)
        self._store_sums(hashes, marks, column_sums or {})
        return self._cache.highest_mark(marks, self._clock())

    def _store_sums(self, hashes: Sequence[bytes], marks: Sequence[Mark], column_sums: Mapping[int, Tensor]) -> None:
        assert self._cache is not None
        if not column_sums:
            return
        position, sums = next(iter(column_sums.items()))
        token_bytes, positions = sums.nbytes // position, list(column_sums)
        stored = self._cache.store_sums(hashes, marks, positions, token_bytes, self.block_size, self._clock())
        for position, key, change in stored:
            self._tell([], self._remove(change.evicted))
            if change.stored:
                self._sums[key] = column_sums[position]

    def expire(self) -> None:
        """Drop what has outlived its TTL."""
        if self._cache:
            self._tell([], self._remove(self._cache.ledger.expire(self._clock())))

    def _remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """Free what is kept under some keys; the keys of full blocks among them."""
        blocks = [key for key in keys if self._sums.pop(key, None) is None]
        return [key for key in blocks if self._blocks.pop(key).shape[3] == self.block_size]

    def _tell(self, stored: Sequence[bytes], gone: Sequence[bytes]) -> None:
        if stored or gone:
            self._publish(stored, gone)

"""The prefixes a replica keeps warm: uncompressed KV blocks in memory, under their chained hashes.

Full blocks are shared by all prompts that begin alike; the partial tail before a breakpoint is stored as well, so that
reuse at a breakpoint is exact to the token. The ledger of `policies/retention.py` decides who stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warmkv.config import PrefixCacheConfig
from warmkv.policies.budgets import KVShape
from warmkv.policies.retention import BlockLedger
from warmkv.prefixes.record import Candidate, Mark


@dataclass(frozen=True, slots=True)
class Match:
    """What the store has of a prompt. `chain` is pinned until `release`."""

    hit: int  # position of the highest breakpoint that may be read; 0 if none
    tokens: int  # leading tokens whose KV is stored, a tail included
    chain: tuple[bytes, ...]  # keys that hold them


class BlockStore:
    """Blocks of one replica. Not thread-safe: the engine's thread owns it.

    `publish(stored, evicted)` is told of every change of the full blocks that are resident.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        shape: KVShape,
        clock: Callable[[], float],
        publish: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda stored, evicted: None,
    ) -> None:
        self._config, self._shape, self._clock, self._publish = config, shape, clock, publish
        self._ledger = BlockLedger(config.memory_bytes)
        self._blocks: dict[bytes, Tensor] = {}  # [2, layers, kv_heads, tokens, head_dim]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def resident_bytes(self) -> int:
        return self._ledger.bytes

    def full_blocks(self) -> list[bytes]:
        """Keys of the resident full blocks, for a snapshot."""
        return [key for key, block in self._blocks.items() if block.shape[3] == self._config.block_size]

    def match(self, hashes: Sequence[bytes], reads: Sequence[Candidate]) -> Match:
        """Find the longest stored prefix of a prompt, note the read and pin what was found.

        `reads` are the positions at which an earlier breakpoint may be read, highest first.
        """
        now = self._clock()
        if not self._config.enabled:
            return Match(0, 0, ())
        size = self._config.block_size
        full = self._ledger.match(hashes, now)
        chain, tokens, hit = tuple(hashes[:full]), full * size, 0
        for read in reads:
            blocks = read.position // size
            if blocks > full or not self._ledger.has_mark(read.key, now):
                continue
            hit = hit or read.position
            if read.position > tokens:
                chain, tokens = (*hashes[:blocks], read.key), read.position
        touched = chain
        if hit and hit < tokens and hit % size:  # the billed tail lies beside the chain that is reused
            tail = next(read.key for read in reads if read.position == hit)
            touched = (*hashes[: hit // size], tail)
            self._ledger.touch(touched, now)
        self._ledger.touch(chain, now)
        self._ledger.pin(chain)
        return Match(hit, tokens, chain)

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
        self._ledger.unpin(match.chain)

    def store(self, hashes: Sequence[bytes], marks: Sequence[Mark], keys: Tensor, values: Tensor) -> None:
        """Keep a computed prompt: its full blocks (up to the last mark, unless automatic) and the tails at its marks.

        keys, values [layers, kv_heads, T, head_dim] of the whole prompt, uncompressed.
        """
        config, size = self._config, self._config.block_size
        if not config.enabled:
            return
        lifetimes: Mapping[str, float] = config.ttls
        if config.automatic:
            self._keep(hashes, None, lifetimes[config.default_ttl], keys, values)
        for mark in marks:
            blocks, rest = divmod(mark.position, size)
            chain = (*hashes[:blocks], mark.key) if rest else hashes[:blocks]
            self._keep(chain, rest or None, lifetimes[mark.ttl], keys, values)
            if mark.key in self._ledger:
                self._ledger.mark(mark.key, lifetimes[mark.ttl], self._clock())

    def expire(self) -> None:
        """Drop what has outlived its TTL."""
        self._forget(self._ledger.expire(self._clock()), [])

    def clear(self) -> None:
        self._forget(self._ledger.clear(), [])

    def _keep(self, chain: Sequence[bytes], tail: int | None, ttl: float, keys: Tensor, values: Tensor) -> None:
        size = self._config.block_size
        lengths = [size] * len(chain)
        if tail is not None:
            lengths[-1] = tail
        token_bytes = self._shape.token_bytes
        admission = self._ledger.store(chain, [n * token_bytes for n in lengths], ttl, self._clock())
        stored = set(admission.stored)
        for index, key in enumerate(chain):
            if key in stored:
                span = slice(index * size, index * size + lengths[index])
                self._blocks[key] = torch.stack([keys[:, :, span], values[:, :, span]])
        self._forget(admission.evicted, [key for key in admission.stored if tail is None or key != chain[-1]])

    def _forget(self, evicted: Sequence[bytes], stored: Sequence[bytes]) -> None:
        size = self._config.block_size
        gone = [key for key in evicted if self._blocks.pop(key).shape[3] == size]
        if stored or gone:
            self._publish(stored, gone)

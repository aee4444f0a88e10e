"""How fast the rules of the prefix cache are with very many blocks, and what they take in memory. No tensors."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from functools import partial

from benchmarks.engine.results import Results
from warmkv.config import Eviction
from warmkv.measuring.clock import now
from warmkv.policies import eviction
from warmkv.policies.eviction import PrefillCost
from warmkv.policies.prefix_cache import Lifetimes, PrefixCache
from warmkv.policies.tiers import Tier

CHAIN, SIZE, TOKEN_BYTES = 256, 64, 1024  # blocks of a prompt, tokens of a block, bytes of a token
LIFETIMES = Lifetimes({"5m": 300.0}, 300.0, automatic=True)
ORDERS: tuple[Eviction, ...] = ("lru", "lfu", "length", "cost")


def prompts(blocks: int) -> list[list[bytes]]:
    """Return hashes of prompts of 256 blocks; the first 32 of each are shared by eight prompts."""
    found = []
    for number in range(blocks // CHAIN):
        if number % 8 == 0:
            shared = [os.urandom(16) for _ in range(32)]
        found.append([*shared, *(os.urandom(16) for _ in range(CHAIN - 32))])
    return found


def race(blocks: int, repeats: int, results: Results, say: Callable[[str], None]) -> None:
    """Blocks a second that are stored in an empty cache, found in a full one, and stored in a full one."""
    for repeat in range(1, repeats + 1):
        say(f"index of {blocks} blocks {repeat}/{repeats}")
        known, more = prompts(blocks), prompts(max(CHAIN, blocks // 10))
        for name in ORDERS:
            cache = _cache(name, blocks)
            results.add(f"inserts_per_second_{name}", _rate(partial(_store, cache), known))
            results.add(f"lookups_per_second_{name}", _rate(partial(_look_up, cache), known))
            results.add(f"replacements_per_second_{name}", _rate(partial(_store, cache), more))
    few = prompts(max(CHAIN, blocks // 10))  # the keys themselves are the requests'
    tracemalloc.start()
    cache = _cache("lru", blocks)
    for hashes in few:
        _store(cache, hashes)
    held = sum(len(run.keys) for run in cache.tree.recent(0))
    results.add("index_bytes_per_block", tracemalloc.get_traced_memory()[0] / held)
    tracemalloc.stop()


def _cache(name: Eviction, blocks: int) -> PrefixCache:
    tier = Tier("device", blocks * SIZE * TOKEN_BYTES, eviction.order(name, PrefillCost(8192)))
    return PrefixCache([tier], TOKEN_BYTES, LIFETIMES)


def _store(cache: PrefixCache, hashes: list[bytes]) -> None:
    cache.store(hashes, (), SIZE, 0.0)


def _look_up(cache: PrefixCache, hashes: list[bytes]) -> None:
    cache.release(cache.match(hashes, (), SIZE, 0.0))


def _rate(action: Callable[[list[bytes]], None], chains: list[list[bytes]]) -> float:
    """Return blocks a second."""
    began = now()
    for hashes in chains:
        action(hashes)
    return sum(map(len, chains)) / (now() - began)

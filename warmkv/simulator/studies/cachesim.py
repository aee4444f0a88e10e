"""What prefix caches of many sizes and lifetimes would have found in a trace. There is no time but the arrivals'.

Requests come in order and take no time. Each looks up its blocks from the first on until one is missing, and then uses
all of them. The rates are shares of all prompt tokens and of all blocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warmkv.faults import UserError
from warmkv.policies.eviction import Order
from warmkv.policies.prefix_tree.radix import RadixTree
from warmkv.policies.tiers import Tier
from warmkv.simulator.cache.stack_distance import needs
from warmkv.simulator.studies.quantities import Unit
from warmkv.simulator.traces import Trace
from warmkv.simulator.traces.columns import UNKNOWN

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Scope = Literal["global", "session", "tenant"]

GRACE = 1e-6  # seconds: an index drops a block at the end of its TTL, here it is found to the second
PROGRESS_EVERY = 100  # requests
NOT_REUSED = 1 << 62  # is no request's number


class CacheSimError(UserError):
    """A question that a trace cannot answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Correction:
    """For traces whose blocks are coarser than those of the cache that is modelled.

    `partial`: tokens that are found beyond the last block when a hit ends within the prompt; half a block on average.
    `least`: tokens that a hit counts at least, as where all requests share a system prompt longer than a block.
    """

    partial: int = 0
    least: int = 0


@dataclass(frozen=True, slots=True)
class Hits:
    """What a cache found of a trace. Rates are 0 where there is nothing to find."""

    tokens: int
    blocks: int
    token_rate: float
    block_rate: float


class Walked(NamedTuple):
    """A request as a cache sees it that is walked through block by block."""

    arrival: float
    chain: Sequence[bytes]
    tokens: Sequence[int]  # of each block
    weights: Sequence[int]  # of each, in the unit of the capacity
    needs: Sequence[int]  # the requests that use them next, by number


Cache = Callable[[Walked], int]
"""Uses the blocks of a request; returns how many leading ones were there."""


class LruCurve:
    """Hits of LRU caches at any capacity, computed once for a trace, a scope and a unit of capacity."""

    def __init__(self, worth: Ints, capacity: Floats, lifetime: Floats, input_tokens: int) -> None:
        self._worth, self._capacity, self._lifetime = worth, capacity, lifetime
        self._input_tokens = input_tokens
        self._sorted: dict[float, tuple[Floats, Ints]] = {}  # by TTL: needs in order, and what they add up to

    def hits(self, capacity: float, ttl: float = math.inf) -> Hits:
        """Return the hits at a capacity in the curve's unit.

        A block used `ttl` seconds ago, to the second, is still found.
        """
        needed, total = self._by_capacity(ttl)
        blocks = int(np.searchsorted(needed, capacity, side="right")) if not math.isinf(capacity) else len(needed)
        tokens, count = int(total[blocks]), len(self._worth)
        return Hits(
            tokens,
            blocks,
            tokens / self._input_tokens if self._input_tokens else 0.0,
            blocks / count if count else 0.0,
        )

    @property
    def enough(self) -> float:
        """Return the least capacity that finds all that can be found; 0 if nothing can."""
        needed, _ = self._by_capacity(math.inf)
        return float(needed[-1]) if len(needed) else 0.0

    def _by_capacity(self, ttl: float) -> tuple[Floats, Ints]:
        if ttl not in self._sorted:
            alive = np.isfinite(self._capacity) & (self._lifetime <= ttl)
            needed = self._capacity[alive]
            order = np.argsort(needed, kind="stable")
            self._sorted[ttl] = needed[order], np.concatenate([[0], np.cumsum(self._worth[alive][order])])
        return self._sorted[ttl]


def lru(
    trace: Trace,
    *,
    unit: Unit = "tokens",
    scope: Scope = "global",
    correction: Correction = Correction(),
    tail_first: bool = False,
) -> LruCurve:
    """Simulate LRU in one pass over a trace. With a scope, every session or tenant has a cache of that capacity to
    itself.

    `tail_first`: the ends of prompts are evicted first, as in warmkv's own stores; else their heads, as in the
    published figures. Raises CacheSimError if the trace has no blocks, or does not tell the scope.
    """
    _need_blocks(trace)
    grouped = _grouped(trace, scope)
    sizes = grouped.block_tokens()
    weights = sizes if unit == "tokens" else np.ones_like(sizes)
    found = needs(grouped.blocks, grouped.offsets, weights, grouped.arrival, tail_first=tail_first)
    worth = _worth(grouped, sizes, correction)
    return LruCurve(worth, found.capacity, found.lifetime, int(trace.input_tokens.sum(dtype=np.int64)))


def by_order(
    trace: Trace,
    order: Order,
    capacity: float,
    ttl: float = math.inf,
    *,
    unit: Unit = "tokens",
    scope: Scope = "global",
    correction: Correction = Correction(),
    progress: Callable[[int], None] = lambda requests: None,
) -> Hits:
    """Simulate one cache with the tree of the live stores. Raises CacheSimError as `lru` does.

    Under every order only ends of chains are evicted, as with `lru(tail_first=True)`.
    """

    def empty(room: int) -> Cache:
        tree = RadixTree([Tier("device", room, order)])

        def use(request: Walked) -> int:
            now, chain, kinds = request.arrival, request.chain, list(zip(request.tokens, request.weights, strict=True))
            tree.expire(now)
            path = tree.find(chain)
            at = hit = sum([node.length for node in path])
            tree.touch(path, now)
            while at < len(chain):
                end = next((end for end in range(at, len(chain)) if kinds[end] != kinds[at]), len(chain))
                path.append(tree.behind(path, chain[at:end], *kinds[at]))
                at = end
            if path:
                tree.store(path, ttl + GRACE, now, "")
                tree.changes()
            return hit

        return use

    if not _stand_for_prefixes(trace):
        behind = "a prompt has the same block twice, or one that stands behind different ones elsewhere"
        raise CacheSimError(f"{behind}; only --eviction lru can count that")
    return _walk(trace, empty, capacity, ttl, unit, scope, correction, progress)


def optimal(
    trace: Trace,
    capacity: float,
    ttl: float = math.inf,
    *,
    unit: Unit = "tokens",
    scope: Scope = "global",
    correction: Correction = Correction(),
    progress: Callable[[int], None] = lambda requests: None,
) -> Hits:
    """Simulate one cache that knows the future, as `by_order`: no order finds more blocks, where all have one size.

    What is needed again last goes first, and is not kept where all that is held is needed before (Belady, 1966). A
    block is needed whenever those behind it are, so ends of chains go first by themselves.
    """

    def empty(room: int) -> Cache:
        held: dict[bytes, tuple[int, int]] = {}  # by key, when it is needed and its weight
        latest: list[tuple[int, int, bytes]] = []  # heap: negative need and place in its prompt, key
        free = room

        def use(request: Walked) -> int:
            nonlocal free
            hit = next((at for at, key in enumerate(request.chain) if key not in held), len(request.chain))
            for place, (key, weight, need) in enumerate(
                zip(request.chain, request.weights, request.needs, strict=True)
            ):
                if place < hit:
                    free += held.pop(key)[1]
                if need == NOT_REUSED:
                    continue  # nor is anything behind it needed
                while free < weight and latest and -latest[0][0] > need:
                    due, _, other = heapq.heappop(latest)
                    if held.get(other, (0, 0))[0] == -due:  # else it was needed since, or is gone
                        free += held.pop(other)[1]
                if free < weight:
                    break
                free -= weight
                held[key] = need, weight
                heapq.heappush(latest, (-need, -place, key))
            return hit

        return use

    return _walk(trace, empty, capacity, ttl, unit, scope, correction, progress)


def _walk(
    trace: Trace,
    empty: Callable[[int], Cache],
    capacity: float,
    ttl: float,
    unit: Unit,
    scope: Scope,
    correction: Correction,
    progress: Callable[[int], None],
) -> Hits:
    """Let every request use the cache of its scope, which is `empty` at first and has so much room."""
    _need_blocks(trace)
    trace = _grouped(trace, scope)
    owners = np.zeros_like(trace.session) if scope == "global" else getattr(trace, scope)
    sizes = trace.block_tokens()
    worth = np.concatenate([[0], np.cumsum(_worth(trace, sizes, correction))])
    keys, lengths, needs = trace.blocks.view("S8").tolist(), sizes.tolist(), _needs(trace, ttl).tolist()
    bounds = trace.offsets.tolist()
    room = int(min(capacity, sizes.sum()))  # an index counts in whole numbers
    tokens = blocks = 0
    owner, cache = None, empty(room)
    for i, (now, mine) in enumerate(zip(trace.arrival.tolist(), owners.tolist(), strict=True)):
        if mine != owner:
            owner, cache = mine, empty(room)
        start, end = bounds[i], bounds[i + 1]
        chain, held = keys[start:end], lengths[start:end]
        if len(set(chain)) < len(chain):  # no chain of hashes, and an index holds nothing else
            raise CacheSimError("a prompt has the same block twice; only --eviction lru can count that")
        hit = cache(Walked(now, chain, held, held if unit == "tokens" else [1] * len(chain), needs[start:end]))
        tokens += int(worth[start + hit] - worth[start])
        blocks += hit
        if i % PROGRESS_EVERY == 0:
            progress(i)
    prompts, count = int(trace.input_tokens.sum(dtype=np.int64)), len(trace.blocks)
    return Hits(tokens, blocks, tokens / prompts if prompts else 0.0, blocks / count if count else 0.0)


def _stand_for_prefixes(trace: Trace) -> bool:
    """Return True if every block always follows the same one."""
    _, blocks = np.unique(trace.blocks, return_inverse=True)
    before = np.roll(blocks, 1)
    before[trace.offsets[:-1][np.diff(trace.offsets) > 0]] = -1
    parents = np.empty_like(blocks)
    parents[blocks] = before
    return bool((parents[blocks] == before).all())


def _needs(trace: Trace, ttl: float) -> Ints:
    """Return the request that uses each block next, by number; `NOT_REUSED` if none does within the TTL."""
    request = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    order = np.argsort(trace.blocks, kind="stable")
    again = trace.blocks[order][1:] == trace.blocks[order][:-1]
    first, following = order[:-1][again], order[1:][again]
    in_time = trace.arrival[request[following]] - trace.arrival[request[first]] <= ttl
    found: Ints = np.full(len(trace.blocks), NOT_REUSED)
    found[first[in_time]] = request[following[in_time]]
    return found


def _need_blocks(trace: Trace) -> None:
    if not trace.block_size and len(trace):
        raise CacheSimError(f"a trace of the format {trace.format} has no block hashes, so nothing can be found in it")


def _grouped(trace: Trace, scope: Scope) -> Trace:
    """Group requests by cache, one cache after the other, with blocks of its own.

    Between two uses of a block there are then only requests of its cache, so one pass serves all of them.
    """
    if scope == "global":
        return trace
    owner = trace.session if scope == "session" else trace.tenant
    if (owner == UNKNOWN).any():
        raise CacheSimError(f"the trace does not tell the {scope} of every request")
    order = np.argsort(owner, kind="stable")
    grouped = trace.take(order)
    distinct, blocks = np.unique(grouped.blocks, return_inverse=True)
    blocks += np.repeat(owner[order].astype(np.int64), np.diff(grouped.offsets)) * len(distinct)
    return replace(grouped, blocks=blocks)


def _worth(trace: Trace, sizes: Ints, correction: Correction) -> Ints:
    """Return the [m] prompt tokens that finding each block adds to what the blocks before it give."""
    counts = np.diff(trace.offsets)
    request = np.repeat(np.arange(len(trace)), counts)
    first = trace.offsets[:-1][request]
    total = np.cumsum(sizes)
    found = total - (total[first] - sizes[first])  # tokens up to the end of each block
    prompt = trace.input_tokens[request].astype(np.int64)
    found = np.where(found < prompt, found + correction.partial, found)
    found = np.minimum(np.maximum(found, correction.least), prompt)
    before = np.concatenate([[0], found[:-1]]) if len(found) else found
    before[trace.offsets[:-1][counts > 0]] = 0
    worth: Ints = found - before
    return worth


def round_capacities(most: float) -> list[float]:
    """List 10k, 20k, 50k, 100k, ... up to the first that is enough."""
    steps = [digit * 10.0**power for power in range(4, 16) for digit in (1, 2, 5)]
    return [step for step in steps if step < most] + [next((step for step in steps if step >= most), steps[-1])]

"""The caching contract over a cache that vLLM keeps: what may be read, for how long, and what the directory is told.

vLLM knows neither TTLs nor breakpoints, and evicts what it likes. So the rules of `policies/prefix_cache.py` run here
on an index without bytes: what is gone by its events is dropped, what outlived its TTL is neither billed as read nor
told to the directory, though vLLM may have it still.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from warmkv.policies.contents import Contents, contents_of
from warmkv.policies.keep_warm import KeepWarm, KeptPrefix
from warmkv.policies.prefix_cache import Lifetimes, PrefixCache
from warmkv.policies.prefix_tree.held import Change, Left
from warmkv.policies.tiers import Tier
from warmkv.prefixes import hashing
from warmkv.prefixes.index import TIERS
from warmkv.replicas.block_store.presence import Publish
from warmkv.replicas.block_store.residency import Residency
from warmkv.replicas.block_store.store import LEFT
from warmkv.replicas.engines.kv_events import TIER_OF, BlocksStored, KVEvent, VllmBlocks, cache_salt, root_of
from warmkv.replicas.protocol import GenerateRequest


@dataclass(frozen=True, slots=True)
class Reading:
    """What a prompt read and what is written of it now, as `Started` tells it."""

    hit: int
    written: int
    cached_tokens: int
    ttl: float


class PrefixLedger:
    """Blocks of a vLLM engine with the lives that requests gave them. For one thread.

    `limit` are the bytes of vLLM's cache, `token_bytes` those of a token in it, `keep_warm` those of prefixes that are
    touched. Where vLLM caches nothing (`enabled`), it tells of no blocks, so none has other names.
    """

    def __init__(
        self,
        block_size: int,
        token_bytes: int,
        limit: int,
        lifetimes: Lifetimes,
        clock: Callable[[], float],
        publish: Publish,
        keep_warm: int = 0,
        *,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._size, self._token_bytes, self._limit = block_size, token_bytes, limit
        self._lifetimes, self._clock, self._publish = lifetimes, clock, publish
        # Twice what vLLM has room for: tails, which are no blocks of vLLM's, are counted as well.
        self._cache = PrefixCache([Tier(TIERS[0], 2 * limit)], token_bytes, lifetimes)
        self._blocks = VllmBlocks(block_size, self._root_of)
        self._held: set[bytes] = set()  # of what the rules keep
        self._published: dict[bytes, str] = {}
        self._names: defaultdict[bytes, set[bytes]] = defaultdict(set)  # other names of blocks, by their own key
        self._own: dict[bytes, bytes] = {}  # and the other way round
        self._coming: dict[str, list[bytes]] = {}  # such blocks of the requests that have no token yet
        self._tenants: dict[bytes, str] = {}  # by the root of their chains
        self._generations: dict[bytes, int] = {}  # of these, where prefixes were dropped
        self._tails: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by the block that they follow
        self._before: dict[bytes, bytes] = {}  # and the other way round
        self._warm: KeepWarm[bytes, bytes] = KeepWarm(keep_warm // (block_size * token_bytes))
        self._stored = 0  # blocks that came to vLLM's cache so far
        self.left: dict[tuple[str, str], int] = {(tier, why): 0 for tier in TIERS for why in LEFT}
        self.lost: dict[str, int] = {}  # vLLM moves no blocks and reads none from a disk
        self.residency = Residency()

    # --- what it tells

    @property
    def tier_limits(self) -> dict[str, int]:
        """Return the bytes that prefixes may take."""
        return {TIERS[0]: self._limit}

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Return the bytes of what may be read, by tier."""
        counts = dict.fromkeys(self.full_blocks(), 0)
        for tier in self._published.values():
            counts[tier] += self._size * self._token_bytes
        return {tier: size for tier, size in counts.items() if size or tier == TIERS[0]}

    def __len__(self) -> int:
        return len(self._published)

    def full_blocks(self) -> dict[str, list[bytes]]:
        """Return keys of the full blocks that may be read, by the fastest tier that has them."""
        found: dict[str, list[bytes]] = {tier: [] for tier in TIERS}
        for key, tier in self._published.items():
            found[tier].append(key)
        return found

    def contents(self, most: int) -> Contents:
        """Return what at most `most` of the blocks and tails that may be read are, by recency."""
        return contents_of(self._cache.tree, most, self._clock(), time.time())

    # --- a request's way

    def salt(self, request: GenerateRequest) -> str:
        """Note whose a request is and by which names its blocks go; return the `cache_salt` it is sent with."""
        self._tenants[request.root] = request.tenant
        if self._enabled and request.other_from is not None:
            first = request.other_from // self._size
            parent = request.hashes[first - 1] if first else request.root
            keys = hashing.block_hashes(request.token_ids[first * self._size :], self._size, parent)
            for name, key in zip(request.hashes[first:], keys, strict=True):
                self._names[key].add(name)
                self._own[name] = key
            self._coming[request.id] = keys
        return cache_salt(request.root, self._generations.get(request.root, 0))

    def ended(self, request_id: str) -> None:
        """Forget the names of what a request has not computed: no event will tell that it is gone."""
        if keys := self._coming.pop(request_id, ()):
            expected = {key for others in self._coming.values() for key in others}
            self._forget_names(key for key in keys if key not in expected and self._blocks.tier(key) is None)

    def lacking_tokens(self, request: GenerateRequest) -> int:
        """Return the tokens of a prompt behind the leading blocks that may be read now."""
        leading = takewhile(self._published.__contains__, request.hashes)
        return len(request.token_ids) - sum(self._size for _ in leading)

    def began(self, request: GenerateRequest, found: int, begun: float) -> Reading:
        """Take note of a prompt that is computed, of which vLLM `found` so many tokens; `begun` is when it began.

        vLLM computes the last token of every prompt again, and the whole block that it is in.
        """
        now, size, tokens = self._clock(), self._size, len(request.token_ids)
        self.expire()
        blocks = found // size if found < (tokens - 1) // size * size else tokens // size
        match = self._cache.match(request.hashes[:blocks], request.reads, size, now)
        self.residency.reused(match.used_at, now)
        self._lifetimes = lifetimes = request.lifetimes or self._lifetimes
        self._apply(
            self._cache.store(request.hashes, request.marks, size, now, request.tenant, match, begun, lifetimes)
        )
        self._cache.release(match)
        self._coming.pop(request.id, None)  # if vLLM has not told of its blocks yet, it will
        self._follow_marks(request, now)
        written = self._cache.highest_mark(request.marks, now)
        return Reading(match.hit, written, min(found, match.tokens), match.ttl)

    def _follow_marks(self, request: GenerateRequest, now: float) -> None:
        """Note which tails go with their blocks, and which prefixes are to be kept warm."""
        size, tokens = self._size, request.token_ids
        chain = tuple(self._own.get(name, name) for name in request.hashes) if self._warm.limit else ()
        self._warm.used(chain, self._stored)
        for mark in request.marks:
            blocks, rest = divmod(mark.position, size)
            if not blocks or self._cache.tree.marked(mark.key, now) is None:
                continue
            if rest:
                self._tails[request.hashes[blocks - 1]].add(mark.key)
                self._before[mark.key] = request.hashes[blocks - 1]
            if chain:
                asked = (*tokens[: blocks * size], tokens[min(blocks * size, len(tokens) - 1)])
                self._warm.keep(KeptPrefix(mark.key, request.root, chain[:blocks], asked, mark.ttl), self._stored)

    def to_touch(self, usage: float) -> tuple[KeptPrefix[bytes, bytes], str] | None:
        """Return a prefix that is to be touched now, and its `cache_salt`; None if none is.

        `usage` is the share of vLLM's cache that running requests use. A touch is no request: it is not billed, and no
        life is prolonged by it.
        """
        now, tree = self._clock(), self._cache.tree
        room = int(self._limit // (self._size * self._token_bytes) * (1 - usage))

        def alive(prefix: KeptPrefix[bytes, bytes]) -> bool:
            return tree.marked(prefix.mark, now) is not None

        def held(prefix: KeptPrefix[bytes, bytes]) -> bool:
            return all(self._blocks.tier(key) == TIERS[0] for key in prefix.chain)

        prefix = self._warm.due(self._stored, room, alive, held)
        return None if prefix is None else (prefix, cache_salt(prefix.root, self._generations.get(prefix.root, 0)))

    # --- beside the requests

    def take(self, events: Iterable[KVEvent]) -> None:
        """Follow vLLM's cache. Raises MissingEventsError."""
        for event in events:
            changes = self._blocks.apply(event)
            if isinstance(event, BlocksStored) and TIER_OF.get(event.medium) == TIERS[0]:
                self._stored += len(event.hashes)
            touched = [name for key in changes.gone for name in self._named(key)]
            tails = [tail for name in touched for tail in self._tails.get(name, ())]
            self._cache.tree.lose([key for key in (*tails, *reversed(touched)) if key in self._held], 0)
            self._apply(self._cache.tree.changes())
            self._forget_names(changes.gone)
            if self._lifetimes.automatic:
                self._keep(list(changes.stored))
            self._tell([name for key in changes.stored for name in self._named(key)])

    def expire(self) -> None:
        """Drop what has outlived its TTL."""
        self._apply(self._cache.expire(self._clock()))

    def drop(self, tenant: str) -> int:
        """Forget what is stored of a tenant: no request finds it any more; the bytes."""
        before, gone = sum(self.tier_bytes.values()), list[bytes]()
        for root, name in self._tenants.items():
            if name == tenant:
                self._generations[root] = self._generations.get(root, 0) + 1
                gone += self._blocks.forget(root)
        self._cache.tree.drop(tenant, set())
        self._apply(self._cache.tree.changes(), "dropped")
        self._forget_names(gone)
        return before - sum(self.tier_bytes.values())

    def _root_of(self, salt: str | None) -> bytes | None:
        root = root_of(salt)
        if root is None or salt != cache_salt(root, self._generations.get(root, 0)):
            return None
        return root

    def _keep(self, keys: Sequence[bytes]) -> None:
        """Let blocks live that no request has written: those of generated tokens, say.

        Those before them that have outlived their TTL stay dead: the request that computes these has read none.
        """
        self.expire()
        now, ttl, held, new = self._clock(), self._lifetimes.default, self._held, set(keys)
        dead: set[bytes] = set()
        for key in reversed(keys):  # the last one's chain has the others
            if key in held or key in dead:
                continue
            chain = self._blocks.chain(key)
            # Requests know a block by other names, by which it is read, or it has expired: with all behind it.
            alive = len(list(takewhile(lambda name: name in held or (name in new and name not in self._names), chain)))
            if alive < len(chain):
                dead.update(chain[alive:])
            elif chain:
                tenant = self._tenants.get(self._blocks.root(key), "")
                self._apply(self._cache.keep(chain, self._size, ttl, now, tenant))

    def _forget_names(self, keys: Iterable[bytes]) -> None:
        """Forget the other names of blocks that vLLM's cache has no more."""
        for key in keys:
            for name in self._names.pop(key, ()):
                self._own.pop(name, None)

    def _named(self, key: bytes) -> Iterable[bytes]:
        return (key, *self._names.get(key, ()))

    def _apply(self, changes: Iterable[Change], dropped: str = "evicted") -> None:
        """Count what leaves, by `dropped` what was given up, and publish what changed."""
        changed: list[bytes] = []
        for change in changes:
            run = change.run
            changed += run.keys
            if not isinstance(change, Left):
                self._held.update(run.keys)
                continue
            self._held.difference_update(run.keys)
            for key in run.keys:
                if (before := self._before.pop(key, None)) is not None:
                    self._tails[before].discard(key)
                    if not self._tails[before]:
                        del self._tails[before]
            self.left[TIERS[0], dropped if change.why == "dropped" else change.why] += len(run.keys)
            if change.why != "dropped":
                now, is_evicted = self._clock(), change.why == "evicted"
                self.residency.removed(len(run.keys), run.used_at, run.since, TIERS[0], now, evicted=is_evicted)
        self._tell(changed)

    def _tell(self, keys: Sequence[bytes]) -> None:
        """Publish which of these keys came to another tier, or are not to be read any more."""
        known = self._published
        gone, came = [], dict[str, list[bytes]]()
        for key in dict.fromkeys(keys):
            tier = self._blocks.tier(self._own.get(key, key)) if key in self._held else None
            if tier == known.get(key):
                continue
            if tier is None:
                del known[key]
                gone.append(key)
            else:
                known[key] = tier
                came.setdefault(tier, []).append(key)
        if gone:
            self._publish((), gone, TIERS[0])
        for tier, stored in came.items():
            self._publish(stored, (), tier)

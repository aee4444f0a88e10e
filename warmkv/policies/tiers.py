"""Where a block lives: device, host memory, disk. The rules, without the bytes.

A lower tier holds whole chains, from their first blocks on, whatever the tiers above hold: so it can be read on its
own, after a restart too, and a tier above gives up what lies below at once. What a tier evicts goes down together with
the chain before it; what has expired goes nowhere. What is read is stored again in the first tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from warmkv.config import BlockStorage, PrefixCacheConfig
from warmkv.policies import eviction
from warmkv.policies.entry import LOST, Entry, StoreOutcome
from warmkv.policies.eviction import Order, PrefillCost
from warmkv.policies.retention import TierIndex, as_it_is
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import STORAGES

FILE_BYTES = 4096
"""What a file on disk takes beside its tensors, at most."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One place for blocks. `weigh(plain bytes, tokens)` is what a block takes there."""

    name: str  # device, host, disk
    capacity: int  # bytes
    order: Order = eviction.lru
    storage: BlockStorage = "model"
    weigh: Callable[[int, int], int] = as_it_is


class Stored(NamedTuple):
    """A computed block is kept in a tier."""

    key: bytes
    tier: int


class Copied(NamedTuple):
    """A block of one tier is now in a lower one, too."""

    key: bytes
    source: int
    tier: int


@dataclass(frozen=True, slots=True)
class Left:
    """A tier has given a block up."""

    key: bytes
    tier: int
    expired: bool = False
    entry: Entry | None = field(default=None, compare=False, repr=False)  # as it was; None if it was dropped


Step = Stored | Copied | Left
"""What to do with bytes, in order."""


def tiers_of(config: PrefixCacheConfig, shape: KVShape) -> list[Tier]:
    """Return the tiers of a replica, fastest first."""
    order = eviction.order(config.eviction, PrefillCost())
    device = Tier(
        "device",
        config.memory_limit,
        order,
        config.storage,
        weight(config.storage, shape),
    )
    tiers = [device]
    for name, below, extra in (("host", config.host, 0), ("disk", config.disk, FILE_BYTES)):
        if below.memory_bytes:
            weigh = weight(below.storage, shape, extra)
            tiers.append(Tier(name, int(below.memory_bytes), order, below.storage, weigh))
    return tiers


def weight(storage: BlockStorage, shape: KVShape, extra: int = 0) -> Callable[[int, int], int]:
    """Return bytes of a block in a format.

    What is no KV (0 tokens), and tokens beyond whole groups, stay as they are.
    """
    kept = STORAGES[storage]
    packed = shape.layers * shape.kv_heads * kept.entry_bytes(shape.head_dim, shape.dtype_bytes)

    def weigh(plain: int, tokens: int) -> int:
        whole = tokens // kept.group * kept.group
        return plain - whole * shape.token_bytes + round(whole * packed) + extra

    return weigh


class Tiers:
    """The indexes of one replica's tiers, fastest first, and what moves between them. Not thread-safe."""

    def __init__(self, tiers: Sequence[Tier], share: float = 0.0) -> None:
        self.tiers = list(tiers)
        self.indexes = [TierIndex(tier.capacity, tier.order, weigh=tier.weigh, share=share) for tier in tiers]

    @property
    def next_deadline(self) -> float:
        return min(index.next_deadline for index in self.indexes)

    def __contains__(self, key: bytes) -> bool:
        return any(key in index for index in self.indexes)

    def fastest(self, key: bytes) -> str | None:
        """Return the fastest tier that has a key; None if none has it."""
        for tier, index in zip(self.tiers, self.indexes, strict=True):
            if key in index:
                return tier.name
        return None

    def match(self, chain: Sequence[bytes], now: float) -> int:
        """Return leading keys of a chain that are held and alive in some tier."""
        return max(index.match(chain, now) for index in self.indexes)

    def entries(self, key: bytes) -> list[Entry]:
        """Return a key's entries, one of each tier that has it."""
        return [entry for index in self.indexes if (entry := index.entry(key)) is not None]

    def has_mark(self, key: bytes, now: float) -> bool:
        return any(index.has_mark(key, now) for index in self.indexes)

    def touch(self, chain: Sequence[bytes], now: float) -> None:
        """Refresh a chain in every tier that holds it or its beginning."""
        for index in self.indexes:
            index.touch(chain, now)

    def mark(self, key: bytes, ttl: float, now: float) -> None:
        for index in self.indexes:
            if key in index:
                index.mark(key, ttl, now)

    def pin(self, chain: Sequence[bytes]) -> list[list[Entry]]:
        """Keep a chain in all tiers until `unpin` of what is returned."""
        return [index.pin(chain) for index in self.indexes]

    def unpin(self, held: Sequence[Sequence[Entry]]) -> None:
        for index, entries in zip(self.indexes, held, strict=True):
            index.unpin(entries)

    def store(
        self,
        chain: Sequence[bytes],
        sizes: Sequence[int],
        tokens: Sequence[int],
        ttl: float,
        now: float,
        tenant: str,
    ) -> Iterator[Step]:
        """Keep a computed chain in the first tier, and in the next one as well if not all of it fits there."""
        for tier, index in enumerate(self.indexes):
            admission = index.store(chain, sizes, ttl, now, tokens=tokens, tenant=tenant)
            for key in admission.stored:
                for other in self.indexes:
                    if other is not index and key in other and (entry := other.entry(key)) is not None:
                        index.inherit(key, entry)
            yield from self._apply(tier, admission, now)
            if all(key in index for key in chain):
                break
        for index in self.indexes:  # a chain that lives longer now does so wherever it is
            index.prolong(chain, ttl, now)

    def adopt(self, path: Sequence[Entry], now: float) -> Iterator[Step]:
        """Keep a chain that another replica has, with what is left of its lives there; where, as `store` says."""
        for tier, index in enumerate(self.indexes):
            yield from self._apply(tier, index.adopt(path, now), now)
            if all(entry.key in index for entry in path):
                break

    def promote(self, chain: Sequence[bytes], now: float) -> Iterator[Step]:
        """Keep in the first tier what was found further down."""
        found = [self._lowest(key) for key in chain[: self.match(chain, now)]]
        entries = [entry for entry in found if entry is not None]
        if not all(entry.key in self.indexes[0] for entry in entries):
            yield from self._apply(0, self.indexes[0].adopt(entries, now), now)

    def expire(self, now: float) -> Iterator[Step]:
        for tier, index in enumerate(self.indexes):
            yield from self._gone(tier, StoreOutcome(expired=index.expire(now)), now)

    def drop(self, keys: Sequence[bytes]) -> Iterator[Step]:
        """Remove keys from every tier at once, readers or not."""
        for tier, index in enumerate(self.indexes):
            for key in keys:
                if key in index:
                    index.lose(key)
                    yield Left(key, tier)

    def _lowest(self, key: bytes) -> Entry | None:
        return next((index.entry(key) for index in reversed(self.indexes) if key in index), None)

    def _apply(self, tier: int, admission: StoreOutcome, now: float) -> Iterator[Step]:
        yield from self._gone(tier, admission, now)
        for key in admission.stored:
            yield Stored(key, tier)

    def _gone(self, tier: int, admission: StoreOutcome, now: float) -> Iterator[Step]:
        """Yield the steps by which blocks leave a tier: evicted ones are copied to the next tier first."""
        for entry in admission.expired:
            if entry.expires_at != LOST:
                yield Left(entry.key, tier, True, entry)
        for entry in admission.evicted:
            if entry.expires_at == LOST:
                continue
            if tier + 1 < len(self.indexes) and entry.key not in self.indexes[tier + 1]:
                yield from self._demote(tier, entry.path(), admission, now)
            yield Left(entry.key, tier, False, entry)

    def _demote(self, tier: int, path: Sequence[Entry], admission: StoreOutcome, now: float) -> Iterator[Step]:
        """Copy a chain to the next tier, if all of it is there: a block may be lost, or only just come back."""
        if any(entry.expires_at == LOST or entry.key in admission.stored for entry in path):
            return
        below = self.indexes[tier + 1].adopt(path, now)
        yield from self._gone(tier + 1, below, now)
        for key in below.stored:
            yield Copied(key, tier, tier + 1)

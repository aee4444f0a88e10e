"""Where a block lives: device, host memory, disk. What moves between these, `prefix_tree` says.

A lower tier holds whole chains, from their first blocks on, whatever the tiers above hold: so it can be read on its
own, after a restart too, and a tier above gives up what lies below at once. What a tier evicts goes down together with
the chain before it; what has expired goes nowhere. What is read is stored again in the first tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from warmkv.config import BlockStorage, PrefixCacheConfig
from warmkv.policies import eviction
from warmkv.policies.eviction import Order, PrefillCost
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import STORAGES

FILE_BYTES = 4096
"""What a file on disk takes beside its tensors, at most."""


def as_it_is(plain: int, tokens: int) -> int:
    return plain


@dataclass(frozen=True, slots=True)
class Tier:
    """One place for blocks. `weigh(plain bytes, tokens)` is what a block takes there."""

    name: str  # device, host, disk
    capacity: int  # bytes
    order: Order = eviction.lru
    storage: BlockStorage = "model"
    weigh: Callable[[int, int], int] = as_it_is


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


def most_blocks(tiers: Iterable[Tier], plain: int, tokens: int) -> int:
    """Return the blocks, of so many tokens and plain bytes, of the longest chain that some tier can hold."""
    return max((tier.capacity // tier.weigh(plain, tokens) for tier in tiers), default=0)


def weight(storage: BlockStorage, shape: KVShape, extra: int = 0) -> Callable[[int, int], int]:
    """Return a function from a block's bytes and tokens to its bytes in a format.

    What is no KV (0 tokens), and tokens beyond whole groups, stay as they are.
    """
    kept = STORAGES[storage]
    packed = shape.layers * shape.kv_heads * kept.entry_bytes(shape.head_dim, shape.dtype_bytes)

    def weigh(plain: int, tokens: int) -> int:
        whole = tokens // kept.group * kept.group
        return plain - whole * shape.token_bytes + round(whole * packed) + extra

    return weigh

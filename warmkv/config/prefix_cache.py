"""Stored prefixes: tiers, TTLs, eviction, breakpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ByteSize, Field, model_validator

from warmkv.config.base import AutoBytes, Section, planned
from warmkv.policy_spec import STORAGES

Eviction = Literal["lru", "lfu", "length", "cost"]
if TYPE_CHECKING:
    BlockStorage = str
else:
    BlockStorage = Literal[tuple(name for name, storage in STORAGES.items() if storage.for_blocks)]


class TierConfig(Section):
    """Where blocks go that the tier above evicts."""

    memory_bytes: ByteSize = Field(ByteSize(0), description="limit of the tier in one replica; 0 is without it")
    storage: BlockStorage = Field("model", description="format of the blocks; all but model change answers")


class DiskConfig(TierConfig):
    path: Path | None = Field(None, description="folder; every replica of a machine takes a folder of its own in it")

    @model_validator(mode="after")
    def _check(self) -> DiskConfig:
        if (self.memory_bytes > 0) != (self.path is not None):
            raise ValueError("a disk tier needs both path and memory_bytes")
        return self


class PrefixCacheConfig(Section):
    enabled: bool = Field(True, description="reuse stored prefixes")
    automatic: bool = Field(True, description="store every full block of every prompt, not only up to breakpoints")
    block_size: int = Field(64, ge=1, description="tokens in a block")
    memory_bytes: AutoBytes = Field(
        "auto", description="limit of stored blocks on the device of a replica; auto: a third of what is free"
    )
    eviction: Eviction = Field("lru", description="which block goes first: lru, lfu, length (longest prefix) or cost")
    storage: BlockStorage = Field("model", description="format of blocks on the device; all but model change answers")
    host: TierConfig = Field(TierConfig(), description="host memory, pinned where the device is a GPU")
    disk: DiskConfig = Field(DiskConfig(), description="files that survive a restart")
    moving_bytes: AutoBytes = Field(
        "auto",
        description="limit of evicted blocks that are not in a lower tier yet; more are dropped. auto: the KV of the "
        "longest prompt, up to an eighth of the memory for slots and stored prefixes",
    )
    tenant_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of every tier reserved for a tenant: no other can evict it below; 0 is one queue for all",
    )
    packs: tuple[Path, ...] = Field(
        (), description="folders of `warmkv packs build`, loaded at start and never evicted"
    )
    keep_warm: ByteSize = Field(
        ByteSize(0),
        description="limit of prefixes with marks that a replica of vLLM keeps from being evicted before their TTL, by "
        "touching them; 0: none. warmkv's own engine has no need of it and refuses it",
    )
    ttls: dict[str, float] = Field({"5m": 300.0, "1h": 3600.0}, description="names a client may use, in seconds")
    default_ttl: str = Field("5m", description="TTL of automatic blocks and of marks that name none")
    min_tokens: int = Field(64, ge=0, description="a breakpoint before this many tokens is ignored")
    max_breakpoints: int = Field(4, ge=0, description="breakpoints that a request may set; more are refused (400)")

    @property
    def memory_limit(self) -> int:
        """Return memory_bytes. Raises RuntimeError while it is auto."""
        return planned(self.memory_bytes, "prefix_cache.memory_bytes")

    @property
    def moving_limit(self) -> int:
        """Return moving_bytes. Raises RuntimeError while it is auto."""
        return planned(self.moving_bytes, "prefix_cache.moving_bytes")

    @property
    def lower_bytes(self) -> int:
        """Return the limits of the tiers below the device, together."""
        return int(self.host.memory_bytes) + int(self.disk.memory_bytes) if self.enabled else 0

    @model_validator(mode="after")
    def _check(self) -> PrefixCacheConfig:
        if self.default_ttl not in self.ttls:
            raise ValueError(f"default_ttl {self.default_ttl!r} is not one of ttls: {', '.join(self.ttls)}")
        if not all(0 < seconds < math.inf for seconds in self.ttls.values()):
            raise ValueError("every TTL must be positive and finite")
        return self

"""Snapshot what a replica does and holds, as one value that other threads may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from warmkv.replicas.block_store import BlockStore
from warmkv.replicas.engine.faults import FailureKind
from warmkv.replicas.engine.prompts import Compressions
from warmkv.replicas.engine.scheduler import Scheduler
from warmkv.replicas.slots.slots import SlotPool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Report load and memory of a replica as of a step; bytes on its device."""

    waiting: int
    decoding: int
    preempted: int  # requests set aside so far
    slots: int  # decode slots that are taken
    weight_bytes: int
    slot_bytes: int  # all slabs, their free rows included, and what is set aside for prompts being computed
    workspace_bytes: int
    store_bytes: int  # of the prefix cache on the device; over vLLM at most what running requests leave of its cache
    store_blocks: int
    pinned_bytes: int  # of the prefix cache in all tiers that requests are reading
    store_tiers: Mapping[str, int]  # bytes of the prefix cache by tier: device, host, disk
    evicted: int  # blocks that left a tier of it so far to make room, or were dropped
    expired: int  # and those whose TTL had run out
    failures: Mapping[FailureKind, int]  # requests that failed so far, by cause
    slot_limit: int  # bytes that slots and workspaces may take
    compressed: Mapping[str, Compressions]  # prompts so far, by policy
    step_bytes: int = 0  # of CUDA graphs of decode steps, and of what steps are told, work with and leave
    preempted_for: Literal["fairness", "memory"] = "fairness"  # among tenants; or vLLM's cache was full
    touched: int = 0  # prefixes that were touched so far to keep them warm
    allocator_bytes: int | None = None  # what PyTorch's allocator has handed out; it keeps no account on a CPU


def snapshot(
    scheduler: Scheduler,
    pool: SlotPool,
    store: BlockStore,
    failures: Mapping[FailureKind, int],
    weight_bytes: int,
    compressed: Mapping[str, Compressions],
    recorded_bytes: int,
) -> EngineStats:
    """Take a snapshot. For the engine's thread, which changes its sources."""
    return EngineStats(
        waiting=len(scheduler.waiting),
        decoding=len(scheduler.decoding),
        preempted=scheduler.preempted,
        slots=len(pool.slots),
        weight_bytes=weight_bytes,
        slot_bytes=pool.allocated_bytes,
        workspace_bytes=scheduler.workspace_bytes,
        store_bytes=store.resident_bytes,
        store_blocks=len(store),
        pinned_bytes=store.pinned_bytes,
        store_tiers=store.tier_bytes,
        evicted=store.evicted,
        expired=store.expired,
        failures=dict(failures),
        slot_limit=scheduler.kv.bytes,
        compressed=dict(compressed),
        step_bytes=pool.step_bytes + recorded_bytes,
    )

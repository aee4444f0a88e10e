"""Metrics of a replica, from what its engine and its block store report."""

from __future__ import annotations

from warmkv import telemetry
from warmkv.replicas.block_store import BlockStore
from warmkv.replicas.engine.stats import EngineStats


def record(recorder: telemetry.Recorder, stats: EngineStats, store: BlockStore) -> None:
    """Set the gauges, and count what the totals have grown by since the last call."""
    gauge, counter = recorder.set, recorder.grow
    gauge(telemetry.DECODING, stats.decoding)
    gauge(telemetry.WAITING, stats.waiting)
    gauge(telemetry.WEIGHT_BYTES, stats.weight_bytes)
    gauge(telemetry.KV_BYTES, stats.slot_bytes, use="slots")
    gauge(telemetry.KV_BYTES, stats.workspace_bytes, use="workspace")
    gauge(telemetry.KV_BYTES, stats.store_bytes, use="store")
    gauge(telemetry.STORED_BLOCKS, stats.store_blocks)
    for tier, held in stats.store_tiers.items():
        gauge(telemetry.PREFIX_BYTES, held, tier=tier)
    counter(telemetry.PREEMPTED, stats.preempted, reason="fairness")
    for fault, failed in stats.failures.items():
        counter(telemetry.FAILED, failed, fault=fault)
    for tier in store.evictions:
        counter(telemetry.EVICTED_BLOCKS, store.evictions[tier], tier=tier)
        counter(telemetry.EXPIRED_BLOCKS, store.expiries[tier], tier=tier)

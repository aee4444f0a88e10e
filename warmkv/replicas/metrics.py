"""Metrics of a replica, from what its engine and its block store report."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from warmkv import recorders, telemetry

if TYPE_CHECKING:
    from warmkv.replicas.engine.stats import EngineStats
    from warmkv.replicas.engines.interface import StoredPrefixes


def record(recorder: recorders.Recorder, stats: EngineStats, store: StoredPrefixes) -> None:
    """Set the gauges, count what the totals have grown by since the last call, and observe what came since then."""
    gauge, counter = recorder.set, recorder.grow
    gauge(telemetry.DECODING, stats.decoding)
    gauge(telemetry.WAITING, stats.waiting)
    gauge(telemetry.WEIGHT_BYTES, stats.weight_bytes)
    gauge(telemetry.KV_BYTES, stats.slot_bytes, use="slots")
    gauge(telemetry.KV_BYTES, stats.workspace_bytes, use="workspace")
    gauge(telemetry.KV_BYTES, stats.store_bytes, use="store")
    gauge(telemetry.SLOT_LIMIT_BYTES, stats.slot_limit)
    gauge(telemetry.STORED_BLOCKS, stats.store_blocks)
    for tier, held in stats.store_tiers.items():
        gauge(telemetry.PREFIX_BYTES, held, tier=tier)
    for tier, limit in store.tier_limits.items():
        gauge(telemetry.PREFIX_LIMIT_BYTES, limit, tier=tier)
    counter(telemetry.PREEMPTED, stats.preempted, reason=stats.preempted_for)
    counter(telemetry.TOUCHED, stats.touched)
    for fault, failed in stats.failures.items():
        counter(telemetry.FAILED, failed, fault=fault)
    for (tier, why), blocks in store.left.items():
        if why == "expired":
            counter(telemetry.EXPIRED_BLOCKS, blocks, tier=tier)
        else:
            counter(telemetry.EVICTED_BLOCKS, blocks, tier=tier, reason=why)
    for tier, blocks in store.lost.items():
        counter(telemetry.LOST_BLOCKS, blocks, tier=tier)
    for policy, compressed in stats.compressed.items():
        for metric, total in zip(telemetry.COMPRESSION, astuple(compressed), strict=True):
            counter(metric, total, policy=policy)
    _observe(recorder, store)


def _observe(recorder: recorders.Recorder, store: StoredPrefixes) -> None:
    """Record the samples of residency that have come since the last call; the engine's thread adds more meanwhile."""
    residency = store.residency
    while residency.lifetimes:
        tier, seconds = residency.lifetimes.popleft()
        recorder.observe(telemetry.BLOCK_LIFETIME, seconds, tier=tier)
    while residency.idle:
        tier, seconds = residency.idle.popleft()
        recorder.observe(telemetry.BLOCK_IDLE, seconds, tier=tier)
    while residency.gaps:
        recorder.observe(telemetry.REUSE_GAP, residency.gaps.popleft())

"""What a replica tells Prometheus: levels as they are, totals by what they have grown."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from tests.unit.replicas.block_store.harness import BLOCK, TOKEN, Harness, Prompt
from warmkv import recorders, telemetry
from warmkv.replicas import metrics
from warmkv.replicas.block_store.residency import MOST, Residency
from warmkv.replicas.engine.prompts import Compressions
from warmkv.replicas.engine.stats import EngineStats


class Recorded(recorders.RayRecorder):
    """A recorder without Ray."""

    def __init__(self) -> None:
        self._totals = {}
        self.counted: dict[tuple[str, ...], float] = {}
        self.levels: dict[str, float] = {}
        self.observed: dict[telemetry.Metric, list[float]] = {}

    def add(self, counter: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(counter.labels)
        key = (counter.name, *labels.values())
        self.counted[key] = self.counted.get(key, 0) + value

    def observe(self, histogram: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(histogram.labels)
        self.observed.setdefault(histogram, []).append(value)

    def set(self, gauge: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(gauge.labels)
        self.levels[gauge.name] = value


def stats(**more: Any) -> EngineStats:
    zeros: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    others = {"store_tiers": {"device": 5}, "failures": {}, "compressed": {}, "preempted_for": "fairness"}
    return EngineStats(**{**zeros, **others, **more})


def gone(harness: Harness) -> dict[tuple[str, str], int]:
    """Blocks that left a tier so far, and why."""
    return {key: count for key, count in harness.store.left.items() if count}


def test_what_leaves_a_tier_is_counted_by_tier_and_once(tmp_path):
    """Three prompts of four blocks, of which the device holds six: two whole chains are in host memory when all end."""
    harness = Harness(tmp_path, memory_bytes=6 * BLOCK * TOKEN, disk={"memory_bytes": 0})
    recorder = Recorded()
    for prompt in range(3):
        harness.write(Prompt("a", list(range(40 * prompt, 40 * prompt + 4 * BLOCK))), {})
        metrics.record(recorder, stats(), harness.store)
    assert gone(harness) == {("device", "demoted"): 6}
    harness.wait(1000)
    for _ in range(2):
        metrics.record(
            recorder, stats(preempted=3, waiting=2, failures={"request": 1, "memory": 2, "device": 0}), harness.store
        )
    assert gone(harness) == {("device", "demoted"): 6, ("device", "expired"): 6, ("host", "expired"): 8}
    assert {key: value for key, value in recorder.counted.items() if value} == {
        ("warmkv_evicted_blocks", "device", "demoted"): 6,
        ("warmkv_expired_blocks", "device"): 6,
        ("warmkv_expired_blocks", "host"): 8,
        ("warmkv_preempted", "fairness"): 3,
        ("warmkv_failed", "request"): 1,
        ("warmkv_failed", "memory"): 2,
    }
    assert recorder.levels["warmkv_waiting_requests"] == 2
    assert (harness.store.evicted, harness.store.expired) == (6, 14)
    assert recorder.levels["warmkv_prefix_limit_bytes"] == harness.config.host.memory_bytes  # of the last tier


def test_what_a_tier_loses_is_counted_by_tier(tmp_path):
    """A damaged file is found by who reads it; another one when the replica starts again."""
    recorder = Recorded()
    harness = Harness(tmp_path, memory_bytes=2 * BLOCK * TOKEN, host={"memory_bytes": 0})
    first = Prompt("a", list(range(2 * BLOCK)))
    harness.write(first, {})
    harness.write(Prompt("a", list(range(40, 40 + 2 * BLOCK))), {})
    harness.run("write", 100)
    metrics.record(recorder, stats(), harness.store)
    assert recorder.counted["warmkv_lost_blocks", "disk"] == 0
    harness.damage(0, "flip")
    harness.look_up(first, [])
    harness.run("read", 100)
    for _ in range(2):
        metrics.record(recorder, stats(), harness.store)
    assert (recorder.counted["warmkv_lost_blocks", "device"], recorder.counted["warmkv_lost_blocks", "disk"]) == (0, 1)
    harness.finish(0, store=True)
    harness.check_at_rest()
    harness.damage(0, "cut")
    harness.restart(crash=False)
    assert harness.store.lost == {"device": 0, "disk": 1}


def test_residency_is_observed_where_blocks_leave_and_prefixes_are_read(tmp_path):
    """A prefix is read 10 s after it was stored, pushed out 5 s later, and ends below by its TTL of 30 s."""
    recorder = Recorded()
    harness = Harness(tmp_path, memory_bytes=4 * BLOCK * TOKEN, disk={"memory_bytes": 0})
    first = Prompt("a", list(range(4 * BLOCK)))
    harness.write(first, {})
    harness.wait(10)
    harness.look_up(first, [])
    harness.finish(0, store=False)
    harness.wait(5)
    harness.write(Prompt("a", list(range(40, 40 + 4 * BLOCK))), {})
    metrics.record(recorder, stats(), harness.store)
    assert recorder.observed == {
        telemetry.REUSE_GAP: [10],
        telemetry.BLOCK_LIFETIME: [15],  # one of four: the first
        telemetry.BLOCK_IDLE: [5],
    }
    harness.store.residency._removed = 0  # the next one is observed
    harness.wait(31)
    metrics.record(recorder, stats(), harness.store)
    assert recorder.observed[telemetry.BLOCK_LIFETIME] == [15, 31]
    assert recorder.observed[telemetry.BLOCK_IDLE] == [5]  # nothing more was evicted
    metrics.record(recorder, stats(), harness.store)
    assert recorder.observed[telemetry.REUSE_GAP] == [10]  # once each


def test_samples_between_two_reports_are_bounded():
    residency = Residency()
    for _ in range(2 * MOST):
        residency.reused(0.0, 1.0)
    residency.reused(math.nan, 1.0)  # of a block from before a restart
    assert list(residency.gaps) == [1.0] * MOST


def test_preemptions_are_counted_by_what_they_made_room_for():
    """Record preemptions of vLLM, whose cache was full; one more is told next."""
    recorder = Recorded()
    store = SimpleNamespace(left={}, lost={}, tier_limits={}, residency=Residency())
    for preempted in (2, 3):
        metrics.record(recorder, stats(preempted=preempted, preempted_for="memory"), store)
    assert {key: value for key, value in recorder.counted.items() if value} == {("warmkv_preempted", "memory"): 3}


def test_compression_is_counted_by_policy():
    recorder, done = Recorded(), Compressions(2, 300, 60, 4000, 1000, 0.5)
    store = SimpleNamespace(left={}, lost={}, tier_limits={}, residency=Residency())
    for compressed in ({"snapkv": done}, {"snapkv": done.plus(done)}):
        metrics.record(recorder, stats(compressed=compressed), store)
    named = {key[0]: value for key, value in recorder.counted.items() if key[1:] == ("snapkv",)}
    assert named == {
        "warmkv_compressed_prompts": 4,
        "warmkv_compressed_tokens": 600,
        "warmkv_kept_tokens": 120,
        "warmkv_uncompressed_bytes": 8000,
        "warmkv_compressed_bytes": 2000,
        "warmkv_compression_seconds": 1.0,
    }

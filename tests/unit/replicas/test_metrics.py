"""What a replica tells Prometheus: levels as they are, totals by what they have grown."""

from __future__ import annotations

from typing import Any

from tests.unit.replicas.block_store.harness import BLOCK, TOKEN, Harness, Prompt
from warmkv import telemetry
from warmkv.replicas import metrics
from warmkv.replicas.engine.stats import EngineStats


class Recorded(telemetry.RayRecorder):
    """A recorder without Ray."""

    def __init__(self) -> None:
        self._totals = {}
        self.counted: dict[tuple[str, ...], float] = {}
        self.levels: dict[str, float] = {}

    def add(self, counter: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(counter.labels)
        key = (counter.name, *labels.values())
        self.counted[key] = self.counted.get(key, 0) + value

    def set(self, gauge: telemetry.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(gauge.labels)
        self.levels[gauge.name] = value


def stats(**more: Any) -> EngineStats:
    zeros: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    return EngineStats(**{**zeros, "store_tiers": {"device": 5}, "failures": {}, **more})


def test_what_leaves_a_tier_is_counted_by_tier_and_once(tmp_path):
    """Three prompts of four blocks, of which the device holds six: two whole chains are in host memory when all end."""
    harness = Harness(tmp_path, memory_bytes=6 * BLOCK * TOKEN, disk={"memory_bytes": 0})
    recorder = Recorded()
    for prompt in range(3):
        harness.write(Prompt("a", list(range(40 * prompt, 40 * prompt + 4 * BLOCK))), {})
        metrics.record(recorder, stats(), harness.store)
    assert harness.store.evictions == {"device": 6, "host": 0}
    harness.wait(1000)
    for _ in range(2):
        metrics.record(
            recorder, stats(preempted=3, waiting=2, failures={"request": 1, "memory": 2, "device": 0}), harness.store
        )
    assert harness.store.expiries == {"device": 6, "host": 8}
    assert {key: value for key, value in recorder.counted.items() if value} == {
        ("warmkv_evicted_blocks", "device"): 6,
        ("warmkv_expired_blocks", "device"): 6,
        ("warmkv_expired_blocks", "host"): 8,
        ("warmkv_preempted", "fairness"): 3,
        ("warmkv_failed", "request"): 1,
        ("warmkv_failed", "memory"): 2,
    }
    assert recorder.levels["warmkv_waiting_requests"] == 2
    assert (harness.store.evicted, harness.store.expired) == (6, 14)

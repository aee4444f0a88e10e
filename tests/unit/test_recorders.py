"""What is recorded reaches Ray's metrics: counters added up, gauges again and again, histograms value by value."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from tests.polling import PATIENCE
from warmkv import recorders, telemetry
from warmkv.recorders import Bounded, RayRecorder
from warmkv.telemetry import DECODING, KV_BYTES, LIVE_CONFIG_CHANGE, REJECTED, TTFT, WHATIF_ERROR


class Calls:
    """What Ray was told of one metric, in place of its class."""

    made: dict[str, Calls]

    def __init__(self, name: str, **options: Any) -> None:
        self.told: list[tuple[float, dict[str, str]]] = []
        self.common: dict[str, str] = {}
        self.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.common = tags

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.told.append((value, tags))

    set = observe = inc


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> dict[str, Calls]:
    """Ray's metrics by name; nothing is flushed but by the test."""
    monkeypatch.setattr(recorders, "FLUSH_SECONDS", 1e6)
    Calls.made = {}
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(f"ray.util.metrics.{kind}", Calls)
    return Calls.made


def recorder(*metrics: telemetry.Metric) -> RayRecorder:
    return RayRecorder(*metrics, application="app")


def test_a_counter_is_one_call_for_its_series_and_loses_nothing_between_threads(ray):
    recorded, rounds = recorder(REJECTED), 2000

    def count(reason: str) -> None:
        for number in range(rounds):
            recorded.add(REJECTED, 1, reason=reason)
            recorded.add(REJECTED, 2, reason="all")
            if number % 500 == 0:
                recorded.flush()

    threads = [threading.Thread(target=count, args=(reason,)) for reason in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorded.flush()
    calls, totals = ray[REJECTED.name].told, Counter[str]()
    for value, tags in calls:
        totals[tags["reason"]] += int(value)
    assert totals == {"a": rounds, "b": rounds, "all": 4 * rounds}
    assert len(calls) <= 3 * 9  # of three series at most, for each flush
    recorded.flush()
    assert len(ray[REJECTED.name].told) == len(calls)  # nothing is new
    assert ray[REJECTED.name].common == {"application": "app"}


def test_totals_count_by_what_they_have_grown(ray):
    recorded = recorder(REJECTED)
    for total in (3, 3, 10):
        recorded.grow(REJECTED, total, reason="a")
    recorded.flush()
    recorded.grow(REJECTED, 11, reason="a")
    recorded.flush()
    assert ray[REJECTED.name].told == [(10, {"reason": "a"}), (1, {"reason": "a"})]


def test_gauges_are_given_again_until_they_are_forgotten(ray):
    recorded = recorder(DECODING, KV_BYTES, LIVE_CONFIG_CHANGE)
    recorded.set(DECODING, 1)
    recorded.set(DECODING, 2)
    recorded.set(KV_BYTES, 5, use="slots")
    recorded.set(KV_BYTES, 6, use="store")
    recorded.set(LIVE_CONFIG_CHANGE, 1, version="1", who="a", what="b", why="c")
    recorded.flush()
    recorded.forget(KV_BYTES, use="slots")
    recorded.forget(LIVE_CONFIG_CHANGE)
    recorded.flush()
    assert ray[DECODING.name].told == [(2, {}), (2, {})]
    assert ray[KV_BYTES.name].told == [(5, {"use": "slots"}), (6, {"use": "store"}), (6, {"use": "store"})]
    assert len(ray[LIVE_CONFIG_CHANGE.name].told) == 1


def test_a_histogram_is_given_every_value_at_once(ray):
    recorded = recorder(TTFT)
    recorded.observe(TTFT, 0.5, cache="warm", policy="full", model="m")
    assert ray[TTFT.name].told == [(0.5, {"cache": "warm", "policy": "full", "model": "m"})]


def test_wrong_labels_are_refused_where_they_are_recorded(ray):
    recorded = recorder(REJECTED, DECODING)
    with pytest.raises(ValueError, match="warmkv_rejected is not recorded here with the labels none"):
        recorded.add(REJECTED, 1)
    with pytest.raises(ValueError, match="labels reason"):
        recorded.set(DECODING, 1, reason="a")
    with pytest.raises(ValueError, match="warmkv_whatif_model_error"):
        recorded.set(WHATIF_ERROR, 1, figure="hit_rate")
    recorded.flush()
    assert not ray[REJECTED.name].told


def test_it_flushes_by_itself(ray, monkeypatch):
    flushed = threading.Event()
    monkeypatch.setattr(recorders, "FLUSH_SECONDS", 0.01)
    recorded = recorder(REJECTED)
    monkeypatch.setattr(ray[REJECTED.name], "inc", lambda value, tags: flushed.set())
    recorded.add(REJECTED, 1, reason="a")
    assert flushed.wait(PATIENCE)
    monkeypatch.setattr(recorders, "FLUSH_SECONDS", 1e6)  # its thread rests from now on


def test_a_label_has_a_bounded_number_of_values() -> None:
    label = Bounded(most=2)
    assert [label(tenant) for tenant in ("a", "b", "a", "c", "b", "d")] == ["a", "b", "a", "other", "b", "other"]

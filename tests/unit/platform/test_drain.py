"""Draining: how long it takes at most, and when it is over. A real node is drained in tests/faults."""

from __future__ import annotations

from typing import Any

import pytest

from warmkv.config import parse
from warmkv.platform import application
from warmkv.platform.drain import PAUSE_SECONDS, SPARE_SECONDS, seconds_to_drain, wait_until_empty


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_time_follows_from_the_settings() -> None:
    config = parse({"cluster": {"drain_seconds": 120}})
    assert seconds_to_drain(config) == SPARE_SECONDS + 120 + 40


def test_it_is_over_when_nothing_is_left() -> None:
    time, answers = Time(), iter([["a", "b"], ["b"], []])
    assert wait_until_empty(lambda: next(answers), 60, time.clock, time.sleep) == []
    assert time.now == 100 + 2 * PAUSE_SECONDS


def test_what_is_left_in_the_end_is_told() -> None:
    time = Time()
    assert wait_until_empty(lambda: ["SERVE_REPLICA::a"], 60, time.clock, time.sleep) == ["SERVE_REPLICA::a"]
    assert 160 <= time.now < 160 + 2 * PAUSE_SECONDS


def test_serve_gives_a_replica_its_time_for_answers_and_blocks_behind_what_it_takes_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(application, "start_directory", lambda *_: [])
    monkeypatch.setattr(application, "start_control", lambda *_: None)
    bound: Any = application.build({"cluster": {"drain_seconds": 120}})
    (replica,) = bound._bound_deployment.init_args[2].values()
    known = replica._bound_deployment._deployment_config
    assert known.graceful_shutdown_timeout_s - known.graceful_shutdown_wait_loop_s > 120 + 40


def test_a_gateway_has_as_long_for_its_streams_as_replicas_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "start_directory", lambda *_: [])
    monkeypatch.setattr(application, "start_control", lambda *_: None)
    bound: Any = application.build({"cluster": {"drain_seconds": 120}})
    assert bound._bound_deployment._deployment_config.graceful_shutdown_timeout_s >= 120

"""When those who are refused should try again, and what Serve lets through to the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from warmkv.config import load
from warmkv.platform import application
from warmkv.platform.gateway.intake.overload import Backlog, most_open, retry_header


def test_the_time_is_that_of_all_who_wait_at_the_recent_pace():
    now = [0.0]
    backlog = Backlog(lambda: now[0], memory=4)
    assert backlog.retry_after() == 1
    for _ in range(6):
        backlog.joined()
    assert backlog.retry_after() == 6  # nothing is known yet
    for _ in range(2):
        now[0] += 3
        backlog.left(served=True)
    assert backlog.retry_after() == 4 * 3
    backlog.left(served=False)  # a client that left says nothing of the pace
    assert backlog.retry_after() == 3 * 3
    now[0] += 20  # nothing has moved for longer than is usual
    assert backlog.retry_after() == 60
    now[0] -= 10
    assert backlog.retry_after() == 3 * 10


def test_idle_time_is_no_pace():
    now = [0.0]
    backlog = Backlog(lambda: now[0])
    for _ in range(3):
        backlog.joined()
        now[0] += 2
        backlog.left(served=True)
        now[0] += 1000
    backlog.joined()
    backlog.joined()
    assert backlog.retry_after() == 2 * 2


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (6.01, "7"), (59.5, "60"), (120.0, "120")])
def test_the_header_is_whole_seconds_within_bounds(seconds, header):
    assert retry_header(seconds) == header


def test_serve_never_refuses_what_the_gateway_would(monkeypatch):
    """Serve's refusals are plain text: it queues without limit, and lets more in than the gateway takes."""
    monkeypatch.setattr(application, "start_directory", lambda *_: [])
    monkeypatch.setattr(application, "start_control", lambda *_: None)
    monkeypatch.setattr(application, "start_whatif", lambda *_: None)
    for flags in ((), ("cluster.replicas=5",), ("cluster.max_queued_requests=10",)):
        config = load(flags=flags)
        bound: Any = application.build(config.model_dump(mode="json", exclude_defaults=True))
        deployment = bound._bound_deployment
        assert deployment.name == "gateway"
        assert deployment.max_queued_requests == -1
        assert deployment.max_ongoing_requests > most_open(config)


def test_a_gateway_takes_what_replicas_and_queues_hold():
    config = load(flags=["cluster.replicas=3"])
    cluster = config.cluster
    assert most_open(config) >= 3 * config.ongoing_requests + cluster.max_queued_requests

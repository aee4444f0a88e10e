"""The loop, end to end: the what-if table ranks the known best first, the autopilot gets there, and turns back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from tests.e2e.conftest import OPERATOR, Application, Cluster, application
from tests.polling import PATIENCE, until
from warmkv.platform.whatif.decision import AUTOPILOT

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

TEXT = "for position in range(length):\n    total += position\n" * 6
PACE = 0.25  # seconds between two requests
TTL, AGAIN = 4.0, 6.0  # seconds that a prefix lives, and until its prompt comes again: twice the TTL is enough
REST = 20.0
SETTINGS = {"whatif": {}, "autopilot": {"settle_seconds": REST}}


class Traffic:
    """Prompts that come again every `again` seconds; all are new where that is None."""

    def __init__(self, service: Application) -> None:
        self._service, self._stopped = service, threading.Event()
        self.again: float | None = AGAIN
        self.answered: list[tuple[float, int, int]] = []  # when it came, prompt tokens, and how many were reused

    def run(self) -> None:
        begun = time.monotonic()
        for number in itertools.count():
            if self._stopped.wait(max(0.0, begun + number * PACE - time.monotonic())):
                return
            again, at = self.again, time.monotonic()
            name = f"new {number}" if again is None else f"{again} {number % round(again / PACE)}"
            usage = self._service.ask(f"{name} {TEXT}", "?", max_tokens=2).usage
            prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
            self.answered.append((at, prompt, usage.warmkv["cached_tokens"]))

    def hit_rate(self, since: float) -> float:
        """Share of the prompt tokens that were reused since then."""
        came = [one for one in self.answered if one[0] >= since]
        return sum(reused for _, _, reused in came) / sum(prompt for _, prompt, _ in came)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(PATIENCE)


def get(service: Application, path: str) -> Any:
    answer = requests.get(f"{service.url}/v1/warmkv/{path}", headers=OPERATOR, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def version_of(service: Application, number: int) -> Any:
    """The version of that number, once it is in force; and the table as it was seen last before."""
    seen: list[Any] = []

    def made() -> Any:
        versions = get(service, "policy/history")["versions"]
        if versions and versions[0]["version"] >= number:
            return next(one for one in versions if one["version"] == number)
        seen[:] = [get(service, "whatif")]
        return None

    return until(made, f"version {number} is in force"), seen[0] if seen else None


def mean(figure: Callable[[], float], seconds: float) -> float:
    """The mean of a level over so many seconds."""
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(figure())
        time.sleep(PACE)
    return sum(found) / len(found)


def test_the_cluster_gets_to_the_best_ttl_by_itself_and_turns_back(cluster: Cluster) -> None:
    ttls = {"5m": TTL, "1h": 3600.0}
    with application(cluster, "loop", control=SETTINGS, prefix_cache={"ttls": ttls}) as service:
        traffic = Traffic(service)
        with traffic.flowing():
            step, table = version_of(service, 1)
            best = min((row for row in table["candidates"] if row["rank"]), key=lambda row: row["rank"])
            assert (step["who"], step["changes"]) == (AUTOPILOT, {"prefix_cache.ttls": {**ttls, "5m": 2 * TTL}})
            assert best["candidate"] == "ttl-double"
            time.sleep(REST)
            since = time.monotonic()
            stored = mean(lambda: sum(get(service, "live")["replicas"]["stored_bytes"].values()), REST)
            assert traffic.hit_rate(since) == pytest.approx(best["figures"]["hit_rate"], rel=0.1)
            assert stored == pytest.approx(best["figures"]["resident_bytes"], rel=0.1)
            until(lambda: get(service, "whatif")["autopilot"]["step"] is None, "the step is judged")
            assert get(service, "policy")["version"] == 1  # and kept

            traffic.again = 3 * TTL  # for which eight seconds are too short, and sixteen enough
            version_of(service, 2)
            traffic.again = None  # it turns: nothing comes again
            back, _ = version_of(service, 3)
            assert (back["who"], back["rolled_back_to"]) == (AUTOPILOT, 1)
            assert "has not the predicted effect" in back["why"]

"""The loop, end to end: the what-if table ranks the known best first, the autopilot gets there, and turns back."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import requests

from tests import grafana
from tests.e2e.conftest import OPERATOR, Application, Cluster, application
from tests.polling import PATIENCE, until
from tests.unit.platform.whatif.traffic import evaluated
from warmkv import telemetry
from warmkv.config.tenants import AUTOPILOT
from warmkv.dashboards.alerts import ALERTS
from warmkv.observe import prometheus_binary, scraping
from warmkv.platform.local import metrics_addresses

REPLAYED = 600.0  # seconds that replays of lowest priority may take on a busy machine
pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(4 * REPLAYED)]

TEXT = "for position in range(length):\n    total += position\n"  # 14 tokens
SHARED, OWN = TEXT * 5, TEXT * 17  # what is stored, and what is not: most of what a request holds while it decodes
PACE = 0.3  # seconds between two requests
TTL, AGAIN = 4.0, 6.0  # seconds that a prefix lives, and until its prompt comes again: twice the TTL is enough
BUDGET = "snapkv@0.5"  # of which the evaluation says that it leaves the answers as they are; of less it does not
LATE = 1.0
REST = 24.0
TTLS = {"5m": TTL, "1h": 3600.0}
CACHE = {"ttls": TTLS, "automatic": False, "storage": "kivi4"}  # slots are a good part of what is held


@dataclass(frozen=True, slots=True)
class Answered:
    """What a request was told: when it came, prompt tokens, how many were reused, and bytes of its slot."""

    at: float
    prompt: int
    reused: int
    slot_bytes: int


class Traffic:
    """Documents that are asked about again after `again` seconds; all are new where that is None.

    On a slow machine there are fewer of them, and each comes again in time.
    """

    def __init__(self, service: Application) -> None:
        self._service, self._stopped = service, threading.Event()
        self._numbers, self._asked = itertools.count(), dict[str, float]()  # when each document was asked about last
        self.again: float | None = AGAIN
        self.answered: list[Answered] = []

    def run(self) -> None:
        due = time.monotonic()
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            at = time.monotonic()
            due = max(due + PACE, at)
            usage = self._service.ask(f"{self._document(at)} {SHARED}", OWN, max_tokens=16, ignore_eos=True).usage
            prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
            told = usage.warmkv
            self.answered.append(Answered(at, prompt, told["cached_tokens"], told["resident_bytes"]))

    def _document(self, now: float) -> str:
        """Return the document that has just become due; a new one where none has. One that is late is given up."""
        again = self.again
        due = (
            [(at, name) for name, at in self._asked.items() if again - PACE / 2 <= now - at <= again + LATE]
            if again is not None
            else []
        )
        name = max(due)[1] if due else f"{next(self._numbers)}"
        self._asked[name] = now
        return name

    def since(self, since: float) -> list[Answered]:
        return [one for one in self.answered if one.at >= since]

    def hit_rate(self, since: float) -> float:
        """Share of the prompt tokens that were reused since then."""
        came = self.since(since)
        return sum(one.reused for one in came) / sum(one.prompt for one in came)

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

    try:
        return until(made, f"version {number} is in force", seconds=REPLAYED), seen[0] if seen else None
    except AssertionError as error:
        raise AssertionError(f"{error}; the autopilot: {seen[0]['autopilot'] if seen else None}") from None


def mean(figure: Callable[[], float], seconds: float) -> float:
    """The mean of a level over so many seconds."""
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(figure())
        time.sleep(PACE)
    return sum(found) / len(found)


@contextmanager
def watched(folder: Path) -> Iterator[str | None]:
    """Run a Prometheus that scrapes the session's Ray, where one is installed."""
    if shutil.which("prometheus") is None:
        yield None
        return
    with scraping(prometheus_binary(), folder / "prometheus", metrics_addresses(), seconds=1) as address:
        yield address


def seen_in_grafana(prometheus: str, begun: int, steps: tuple[Any, ...]) -> None:
    """Every panel of the what-if service has got data, and every step is marked with its reason."""

    def shown(expression: str) -> list[grafana.Series]:
        found = grafana.series(prometheus, {"expr": expression}, begun, int(time.time()), step=1)
        return [one for one in found if any(value is not None for value in one.values)]

    names = [metric.exported for metric in telemetry.WHATIF]
    missing = [
        place
        for expression, place in grafana.expressions().items()
        if any(name in expression for name in names) and not shown(expression)
    ]
    assert not missing
    for alert in ALERTS:  # those that do not fire have no result, but what they compare is there
        for name in names:
            assert name not in alert.expression or shown(name), (alert.name, name)
    made = {(str(step["version"]), AUTOPILOT, step["why"]) for step in steps}

    def told() -> set[tuple[str | None, ...]]:
        marks = [one.labels for expression in grafana.events() for one in shown(expression)]
        return {(mark.get("version"), mark.get("who"), mark.get("why")) for mark in marks}

    until(lambda: made <= told(), "every step is marked with its reason")


@pytest.mark.soak(least=1)  # it takes four minutes
def test_the_cluster_gets_to_the_best_ttl_and_budget_by_itself_and_turns_back(cluster: Cluster, tmp_path: Path) -> None:
    begun = int(time.time())
    control = {"whatif": {"quality": str(evaluated(tmp_path))}, "autopilot": {"settle_seconds": REST}}
    with (
        watched(tmp_path) as prometheus,
        application(cluster, "loop", control=control, prefix_cache=CACHE) as service,
    ):
        traffic = Traffic(service)
        with traffic.flowing():
            step, table = version_of(service, 1)
            best = min((row for row in table["candidates"] if row["rank"]), key=lambda row: row["rank"])
            known = {"prefix_cache.ttls": {**TTLS, "5m": 2 * TTL}, "compression.policy": BUDGET}
            assert (step["who"], step["changes"], best["changes"]) == (AUTOPILOT, known, known)
            whole = {one.slot_bytes for one in traffic.since(0.0)}
            time.sleep(REST)
            since = time.monotonic()
            stored = mean(lambda: sum(get(service, "live")["replicas"]["stored_bytes"].values()), REST)
            figures, difference = best["figures"], best["difference"]
            assert traffic.hit_rate(since) == pytest.approx(figures["hit_rate"], rel=0.1)
            assert stored == pytest.approx(figures["resident_bytes"], rel=0.1)
            slot = fmean(one.slot_bytes for one in traffic.since(since)) / max(whole)
            assert slot == pytest.approx(1 + difference["slot_bytes"], rel=0.1)
            until(lambda: get(service, "whatif")["autopilot"]["step"] is None, "the step is judged")
            assert get(service, "policy")["version"] == 1  # and kept

            traffic.again = 3 * TTL  # for which eight seconds are too short, and sixteen enough
            version_of(service, 2)
            traffic.again = None  # it turns: nothing comes again
            back, _ = version_of(service, 3)
            assert (back["who"], back["rolled_back_to"]) == (AUTOPILOT, 1)
            assert "has not the predicted effect" in back["why"]
            if prometheus is not None:
                seen_in_grafana(prometheus, begun, (step, back))

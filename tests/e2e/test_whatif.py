"""The what-if service on Ray: gateways feed it, it replays beside the service, and its results are metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.e2e.conftest import OPERATOR, Application, Cluster, application, metrics
from tests.polling import PATIENCE, until
from tests.unit.platform.whatif.traffic import logged, prompts, settings
from warmkv import telemetry
from warmkv.platform.whatif.actor import NICEST, replayed_on_ray
from warmkv.platform.whatif.candidates import NOW, proposals
from warmkv.platform.whatif.replays import Basis, Default, Round
from warmkv.simulator.studies.step_times import ENOUGH

TEXT = "for position in range(length):\n    total += position\n" * 6


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Application]:
    with application(cluster, "whatif", control={"whatif": {}}) as service:
        yield service


def call(served: Application, method: str, path: str = "", **body: Any) -> Any:
    url = f"{served.url}/v1/warmkv/whatif{path}"
    answer = requests.request(method, url, json=body or None, headers=OPERATOR, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_table_is_of_the_service_s_own_requests(served):
    asked = 2 * ENOUGH + 2
    for number in range(asked):
        served.ask(TEXT + str(number % 3), str(number), max_tokens=2)
    added = call(served, "POST", changes={"compression.policy": "snapkv@0.5"})["candidate"]

    def replayed() -> Any:
        table = call(served, "GET")
        rows = {row["candidate"]: row for row in table["candidates"] if row["figures"]}
        return (table, rows) if {NOW, added} <= rows.keys() and table["window"]["seen"] == asked else None

    table, rows = until(replayed, "every candidate is replayed")
    assert (table["fault"], table["window"]["replayed"]["notes"]) == (None, [])
    assert rows[NOW]["figures"]["hit_rate"] > 0.5
    error = table["model_error"]["error"]
    assert abs(error["hit_rate"]) < 0.02  # times are those of a busy machine; hits are not
    assert {"hit_rate", "slot_bytes"} <= rows[added]["difference"].keys()  # which hang on a busy machine's times
    shown = set(telemetry.WHATIF) - {telemetry.WHATIF_QUALITY}  # no evaluation was given
    until(lambda: all(metric.exported in metrics() for metric in shown), "the results are metrics")
    call(served, "DELETE", f"/{added}")


def test_a_replay_is_of_lowest_priority_and_ends_when_it_is_given_up(cluster):
    now = settings()
    records = logged(prompts(), now)[:10]  # too few for step times of their own, which take long to fit
    work = Round(records, now, [Default(0.0, "full")], 0.0, [*proposals(now)] * 1000)  # no end is in sight

    async def scenario() -> None:
        steps = replayed_on_ray(work)
        assert isinstance(await anext(steps), Basis)
        (process,) = replaying()
        assert os.getpriority(os.PRIO_PROCESS, process) == NICEST
        await steps.aclose()

    asyncio.run(scenario())
    until(lambda: not replaying(), "the process has ended")


def replaying() -> list[int]:
    """Return processes that replay."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline") as file:
                    if "ray::_replay" in file.read():
                        found.append(int(entry))
            except OSError:
                continue
    return found

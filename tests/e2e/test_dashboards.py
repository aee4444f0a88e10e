"""Every panel and alert against a real Prometheus that scrapes the session's Ray under load."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from typing import Any

import pytest
import requests

from tests import grafana
from tests.e2e.conftest import Cluster
from tests.polling import PATIENCE, until
from warmkv import telemetry
from warmkv.dashboards.alerts import ALERTS, SLO_SECONDS
from warmkv.observe import prometheus_binary, scraping
from warmkv.platform.local import metrics_addresses

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

TEXT = "for position in range(length):\n    total += position\n" * 30
RARE = re.compile(
    "|".join(
        metric.exported
        for metric in (
            *(telemetry.FAILED, telemetry.PREEMPTED, telemetry.RETRIED, telemetry.REJECTED, telemetry.DROPPED_LINES),
            *(telemetry.TENANTS_READ, telemetry.TENANTS_REFUSED, telemetry.BLOCK_IDLE, telemetry.LOST_BLOCKS),
            *(telemetry.TOUCHED, *telemetry.TRANSFER, *telemetry.WHATIF),
        )
    )
)
"""Series that appear with a fault, a full queue, a damaged file, a tenants file, little memory, over vLLM, or with
blocks that are moved; and those of the what-if service, whose data `test_loop` sees."""


def ask(cluster: Cluster, text: str, policy: str) -> None:
    marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    cluster.anthropic("dashboards").messages.create(
        model=cluster.config.model.name,
        max_tokens=3,
        messages=[{"role": "user", "content": [marked, {"type": "text", "text": "?"}]}],
        extra_body={"temperature": 0, "warmkv": {"policy": policy}},
    )


def test_every_panel_and_alert_gets_data_from_prometheus(cluster, tmp_path):
    """What needs faults, a full queue or the what-if service only has to be understood here."""
    waiting, events, turns = grafana.expressions(), grafana.events(), itertools.count()
    short = {"prefix_cache.ttls": {"5m": 1, "1h": 3600}}
    scraped = scraping(prometheus_binary(), tmp_path / "prometheus", metrics_addresses(), seconds=1)
    with cluster.changed(short), scraped as prometheus:

        def results(expression: str) -> Any:
            query = {"query": grafana.filled(expression)}
            answer: Any = requests.get(f"{prometheus}/api/v1/query", params=query, timeout=PATIENCE).json()
            assert answer["status"] == "success", (expression, answer)
            return answer["data"]["result"]

        def value(expression: str) -> list[float]:
            return [float(sample["value"][1]) for sample in results(expression)]

        def seen(series: str) -> list[float]:
            """Count series, also those that a busy process has not given to Ray in time for the last scrape."""
            return value(f"count(last_over_time({series}[5m]))")

        def marked(version: Any) -> Any:
            """What was marked on the graphs a moment after a change, however long ago that is."""
            moments = [f"last_over_time(({expression.replace('1m', '20s')})[5m:1s])" for expression in events]
            found = [one["metric"] for expression in moments for one in results(expression)]
            return next((one for one in found if one.get("version") == str(version)), None)

        def all_have_data() -> bool:
            number = next(turns)
            for _ in range(2):  # the second one is warm
                ask(cluster, f"{number} {TEXT}", ("full", "snapkv@0.5")[number % 2])
            if number == 3:  # once: what is dropped does not expire
                key = {"x-api-key": "dashboards"}
                requests.delete(f"{cluster.url}/v1/warmkv/prefixes", headers=key, timeout=PATIENCE)
            requests.get(f"{cluster.url}/nothing", timeout=PATIENCE)
            for expression in list(waiting):
                found = value(expression)
                if not all(math.isnan(one) for one in found) or RARE.search(expression):
                    del waiting[expression]
            return not waiting

        try:
            until(all_have_data, "every panel has data")
        except AssertionError:
            raise AssertionError(list(waiting.values())) from None
        for expression in events:
            value(expression)
        changed = cluster.change(changes={"routing.overload": 3}, why='it "pays"')
        mark = until(lambda: marked(changed["version"]), "the change is marked on the graphs")
        assert (mark["who"], mark["what"], mark["why"]) == (changed["who"], "routing.overload = 3", 'it "pays"')
        known = {metric.exported for metric in telemetry.ALL}
        for alert in ALERTS:
            value(alert.expression)
            for name in set(re.findall(r"ray_\w+", alert.expression)) & known:
                assert seen(name) or RARE.search(name), (alert.name, name)
        assert seen(f'{telemetry.TTFT.exported}_bucket{{le="{SLO_SECONDS}"}}')
        rules = requests.get(f"{prometheus}/api/v1/rules", timeout=PATIENCE).json()["data"]["groups"]
        assert [rule["name"] for group in rules for rule in group["rules"]] == [alert.name for alert in ALERTS]

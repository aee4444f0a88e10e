"""The committed alerts are what the code builds; each fires where it should, none on a healthy service."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.polling import PATIENCE
from warmkv import telemetry as t
from warmkv.config import LimitsConfig
from warmkv.dashboards import alerts
from warmkv.dashboards.alerts import ALERTS
from warmkv.telemetry import Metric

ROOT = Path(__file__).parents[3]
BY_NAME = {alert.name: alert for alert in ALERTS}


def series(metric: Metric, values: str, **labels: str) -> dict[str, str]:
    pairs = ", ".join(f'{k}="{v}"' for k, v in {"application": "warmkv", **labels}.items())
    return {"series": f"{metric.exported}{{{pairs}}}", "values": values}


def observed(histogram: Metric, seconds: float, slower: float = 0.0) -> list[dict[str, str]]:
    """A histogram of 60 observations a minute that take so long, and 2 that take longer if that is given."""
    found = []
    for bound in (*histogram.buckets, float("inf")):
        one = series(
            histogram,
            f"0+{60 * (bound >= seconds) + 2 * (bound >= slower > 0)}x180",
            le="+Inf" if bound == float("inf") else str(bound),
        )
        found.append({**one, "series": one["series"].replace("{", "_bucket{", 1)})
    return found


FIGURES = (t.WHATIF_GPU_DOLLARS, t.WHATIF_DOLLARS, t.WHATIF_BYTES)
HEALTHY = {
    "requests": [series(t.REQUESTS, "0+60x180", api="messages", status="ok", policy="full", model="m")],
    "version": [
        series(t.LIVE_CONFIG_VERSION, "3x180", replica="g1"),
        series(t.LIVE_CONFIG_VERSION, "3x180", replica="g2"),
    ],
    "refused": [series(t.LIVE_CONFIG_REFUSED, "0x180", replica="g1")],
    "decoding": [series(t.DECODING, "0x180", replica="r1")],
    "tokens": [
        series(t.TOKENS, "0+6000x180", kind="input", policy="full", model="m"),
        series(t.CACHED_TOKENS, "0+4000x180", policy="full", model="m"),
    ],
    "ttft": observed(t.TTFT, 0.2),
    "queue": observed(t.QUEUE, 0.01),
    "staleness": observed(t.STALENESS, 0.1),
    "following": [series(t.FOLLOWING, "1x180", shard="0", replica="g1")],
    "left out": [series(t.DIRECTORY_LEFT_OUT, "7x180", shard="0")],
    "errors": [
        series(t.ERRORS, "0+30x180", type="invalid_request_error", status="400", api="messages"),
        series(t.ERRORS, "0+30x180", type="api_error", status="500", api="warmkv"),  # of operators
    ],
    "rejected": [series(t.REJECTED, "0+60x180", reason="requests_per_minute")],
    "retried": [series(t.RETRIED, "0+1x180", when="waiting")],
    "failed": [series(t.FAILED, "0+1x180", fault="request"), series(t.FAILED, "4x180", fault="memory")],
    "tenants": [  # refused from minute 150 to 175, and mended
        series(t.TENANTS_READ, "2x149 3x30", result="refused"),
        series(t.TENANTS_REFUSED, "0x149 1x24 0x5", replica="g1"),
        series(t.TENANTS_REFUSED, "0x180", replica="g2"),
    ],
    "slots": [
        series(t.KV_BYTES, "95x180", use="slots", replica="r1"),
        series(t.KV_BYTES, "3x180", use="workspace", replica="r1"),
        series(t.SLOT_LIMIT_BYTES, "100x180", replica="r1"),
    ],
    "waiting": [series(t.WAITING, "0x180", replica="r1"), series(t.WAITING, "4x180", replica="r2")],
    "evicted": [
        series(t.EVICTED_BLOCKS, "0+60x180", tier="device", reason="demoted"),
        series(t.EVICTED_BLOCKS, "0+20x180", tier="host", reason="evicted"),
        series(t.EXPIRED_BLOCKS, "0+30x180", tier="host"),
    ],
    "whatif": [
        *(series(metric, "10x180", candidate="now") for metric in FIGURES),
        *(series(metric, "9.5x180", candidate="best") for metric in FIGURES),
        *(series(metric, "5x180", candidate="worse") for metric in FIGURES),  # by its quality, say
        series(t.WHATIF_RANK, "1x180", candidate="best"),
        series(t.WHATIF_RANK, "2x180", candidate="now"),
        series(t.WHATIF_RANK, "3x180", candidate="worse"),
    ],
    "failing": [  # a restart of the control actor
        series(t.WHATIF_FAILED, "0x169 1 2 3 3 0x6", loop="replays"),
        series(t.WHATIF_FAILED, "2x180", loop="autopilot"),
    ],
    "lines": [series(t.DROPPED_LINES, "5x180", log="access"), series(t.DROPPED_LINES, "0+9x180", log="errors")],
}
"""Series by the minute, by what they are about."""

SICK: dict[str, dict[str, list[dict[str, str]]]] = {
    "WarmkvDown": {"version": []},
    "WarmkvNoReplicas": {"decoding": []},
    "WarmkvErrors": {"errors": [series(t.ERRORS, "0+3x180", type="api_error", status="500", api="messages")]},
    "WarmkvRefuses": {"rejected": [series(t.REJECTED, "0+6x180", reason="replica_queue")]},
    "WarmkvSlow": {"ttft": observed(t.TTFT, 0.2, slower=20)},
    "WarmkvSloBurns": {"ttft": observed(t.TTFT, 3)},
    "WarmkvMemoryShort": {"waiting": [series(t.WAITING, "1x180", replica="r1")]},
    "WarmkvEvictsWithinTtl": {"evicted": [series(t.EVICTED_BLOCKS, "0+20x180", tier="device", reason="evicted")]},
    "WarmkvWhatIfSaves": {
        "whatif": [
            series(t.WHATIF_GPU_DOLLARS, "10x180", candidate="now"),
            series(t.WHATIF_GPU_DOLLARS, "8x180", candidate="best"),
            series(t.WHATIF_RANK, "1x180", candidate="best"),
        ]
    },
    "WarmkvQueues": {"queue": observed(t.QUEUE, 20)},
    "WarmkvReplicaFaults": {"failed": [series(t.FAILED, "_x174 1x6", fault="device")]},
    "WarmkvRetries": {"retried": [series(t.RETRIED, "0+6x180", when="waiting")]},
    "WarmkvHitRateFell": {
        "tokens": [
            series(t.TOKENS, "0+6000x180", kind="input", policy="full", model="m"),
            series(t.CACHED_TOKENS, "0+4000x120 480000+100x60", policy="full", model="m"),
        ]
    },
    "WarmkvWhatIfFails": {"failing": [series(t.WHATIF_FAILED, "0x149 1+1x30", loop="replays")]},
    "WarmkvIndexStale": {"staleness": observed(t.STALENESS, 8)},
    "WarmkvRouterLost": {"following": [series(t.FOLLOWING, "1x120 0x60", shard="0", replica="g1")]},
    "WarmkvDirectoryFull": {"left out": [series(t.DIRECTORY_LEFT_OUT, "0+2x180", shard="0")]},
    "WarmkvTenantsRefused": {"tenants": [series(t.TENANTS_REFUSED, "0x174 1x5", replica="g1")]},
    "WarmkvVersionsDiffer": {
        "version": [
            series(t.LIVE_CONFIG_VERSION, "3x120 4x60", replica="g1"),
            series(t.LIVE_CONFIG_VERSION, "3x180", replica="g2"),
        ]
    },
    "WarmkvLogLost": {"lines": [series(t.DROPPED_LINES, "0x120 0+2x60", log="access")]},
}
"""What differs from a healthy service where an alert fires, at minute 180."""

OTHER = [  # another application, which is well
    series(t.LIVE_CONFIG_VERSION, "0x180", application="other", replica="g3"),
    series(t.DECODING, "0x180", application="other", replica="r3"),
]
SICK_AS_WELL: tuple[tuple[str, dict[str, list[dict[str, str]]]], ...] = (
    ("WarmkvDown", {"version": [series(t.LIVE_CONFIG_VERSION, "3x149", replica="g1"), *OTHER]}),
    (
        "WarmkvVersionsDiffer",
        {
            "version": [series(t.LIVE_CONFIG_VERSION, "0x180", replica="g1")],
            "refused": [series(t.LIVE_CONFIG_REFUSED, "1x180", replica="g1")],
        },
    ),
)
"""Other ways in which alerts fire."""
WELL: tuple[dict[str, list[dict[str, str]]], ...] = (
    {  # an upgrade: the new cluster began with versions of its own
        "version": [
            series(t.LIVE_CONFIG_VERSION, "3x180", replica="g1", ray_io_cluster="warmkv-a"),
            series(t.LIVE_CONFIG_VERSION, "0x180", replica="g2", ray_io_cluster="warmkv-b"),
        ]
    },
)
"""What differs from the healthy service, and is no reason for an alert."""


def test_committed_rules_are_a_fresh_build() -> None:
    for name, make in (("alerts", alerts.groups), ("prometheusrule", alerts.prometheus_rule)):
        assert yaml.safe_load((ROOT / "dashboards" / f"{name}.yaml").read_text()) == make(), "run `make dashboards`"


def test_every_alert_says_what_to_do() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / alerts.RUNBOOKS).read_text(), re.MULTILINE)
    assert [name for name in headings if name.startswith("Warmkv")] == list(BY_NAME)
    for alert in ALERTS:
        rule = alert.rule()
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{alert.name.lower()}"
        assert alert.description.endswith(".")
        assert not alert.summary.endswith(".")


def test_metrics_and_labels_are_those_of_the_service() -> None:
    known = {metric.exported: metric for metric in t.ALL}
    for alert in ALERTS:
        names = re.findall(r"ray_warmkv_\w+", alert.expression)
        assert names
        for name in names:
            assert name in known or name.removesuffix("_bucket") in known, (alert.name, name)
    assert set(alerts.LIMITS.split("|")) == set(LimitsConfig.model_fields)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: alerts are not tried")
def test_promtool_accepts_them_and_each_fires_alone(tmp_path: Path) -> None:
    rules = ROOT / "dashboards" / "alerts.yaml"
    assert set(SICK) == set(BY_NAME)

    def case(firing: str, different: dict[str, list[dict[str, str]]]) -> dict[str, Any]:
        values = [one for what in HEALTHY for one in different.get(what, HEALTHY[what])]
        expected = [{"labels": f'{{alertname="{firing}"}}', "value": 1}] if firing else []
        query = 'count by (alertname) (ALERTS{alertstate="firing"})'
        check = {"expr": query, "eval_time": "180m", "exp_samples": expected}
        return {"name": firing or "healthy", "interval": "1m", "input_series": values, "promql_expr_test": [check]}

    cases = [case("", {}), *(case("", different) for different in WELL)]
    cases += [*(case(name, different) for name, different in (*SICK.items(), *SICK_AS_WELL))]
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "5m", "tests": cases}))
    for command in (["check", "rules", str(rules)], ["test", "rules", str(path)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr + done.stdout

"""The committed dashboards are what the code builds, keep the rules of a good one, and compute what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.polling import PATIENCE
from warmkv import telemetry
from warmkv.config import GatewayConfig
from warmkv.dashboards import metrics_page, queries
from warmkv.dashboards.boards import BOARDS
from warmkv.dashboards.build import build_all, documents

ROOT = Path(__file__).parents[3]
EXPORTED = {metric.exported: metric for metric in telemetry.ALL}
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@pytest.fixture(scope="module")
def boards() -> dict[str, dict[str, Any]]:
    return documents()


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(boards: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for board in boards.values():
        for panel in panels(board):
            for target in panel["targets"]:
                yield f"{panel['title']} {target['refId']}", target["expr"]


def plain(expression: str) -> str:
    """The expression as Prometheus would get it: all applications, policies and models, a range of a minute."""
    return re.sub(r"\$(application|policy|model)\b", ".*", expression.replace("$__rate_interval", "1m"))


def test_committed_json_is_a_fresh_build(tmp_path: Path) -> None:
    for path in build_all(tmp_path):
        committed = ROOT / "dashboards" / path.name
        assert committed.exists(), f"run `make dashboards` and commit {path.name}"
        assert committed.read_bytes() == path.read_bytes(), f"{path.name} is out of date: run `make dashboards`"
    assert {path.stem for path in (ROOT / "dashboards").glob("*.json")} == {board.name for board in BOARDS}, (
        "a file that nothing builds"
    )


def test_variables(boards: dict[str, dict[str, Any]]) -> None:
    for board in boards.values():
        variables = {variable["name"]: variable for variable in board["templating"]["list"]}
        assert variables["datasource"]["type"] == "datasource"
        assert {"application", "policy", "model"} <= set(variables)
        for panel in panels(board):
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]


def test_every_panel_says_what_it_shows(boards: dict[str, dict[str, Any]]) -> None:
    for board in boards.values():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        assert all(ids)
        for panel in panels(board):
            assert panel["title"], panel["id"]
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["targets"], panel["title"]
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_annotations_show_changes(boards: dict[str, dict[str, Any]]) -> None:
    for board in boards.values():
        assert any(entry["target"].get("tags") == ["warmkv"] for entry in board["annotations"]["list"])


def faults(expression: str) -> list[str]:
    """Breaches of the rules for one expression."""
    found = []
    for match in re.finditer(r"ray_\w+", expression):
        name, before, after = match[0], expression[: match.start()], expression[match.end() :]
        metric = EXPORTED.get(re.sub(r"_(bucket|sum|count)$", "", name)) or EXPORTED.get(name)
        if metric is None:
            found.append(f"{name} is no metric of warmkv.telemetry")
            continue
        rated = re.search(r"\b(rate|increase)\($", before) is not None
        if (metric.kind == "gauge") == rated:
            found.append(f"{name} is a {metric.kind}: {'rate' if rated else 'no rate'}")
        if rated and not re.match(r"{[^}]*}\[\$__rate_interval\]", after):
            found.append(f"{name}: the range must be $__rate_interval")
        if not re.search(r"sum by \([\w, ]*\) \((rate\()?$", before):
            found.append(f"{name} is not aggregated")
        if not after.startswith('{application=~"$application"'):
            found.append(f"{name} is not filtered by application")
    return found


def test_expressions_keep_the_rules(boards: dict[str, dict[str, Any]]) -> None:
    assert {where: bad for where, expr in expressions(boards) if (bad := faults(expr))} == {}


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ('sum by (api) (ray_warmkv_requests_total{application=~"$application"})', "no rate"),
        ('sum by (api) (rate(ray_warmkv_requests_total{application=~"$application"}[5m]))', "range"),
        ('rate(ray_warmkv_requests_total{application=~"$application"}[$__rate_interval])', "aggregated"),
        ("sum by (api) (rate(ray_warmkv_requests_total[$__rate_interval]))", "filtered"),
        ('sum by (use) (ray_warmkv_bytes{application=~"$application"})', "no metric"),
    ],
)
def test_the_rules_find_faults(expression: str, fault: str) -> None:
    assert any(fault in found for found in faults(expression))


def test_every_metric_is_shown(boards: dict[str, dict[str, Any]]) -> None:
    shown = " ".join(expression for _, expression in expressions(boards))
    assert [metric.name for metric in telemetry.ALL if metric.exported not in shown] == []


def test_the_page_of_metrics_is_what_the_code_writes() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page.page(), "docs/metrics.md: run `make dashboards`"
    listed = [metric for _, metrics in metrics_page.SECTIONS for metric in metrics]
    assert sorted(metric.name for metric in listed) == sorted(metric.name for metric in telemetry.ALL)


def test_buckets_reach_as_far_as_what_they_measure() -> None:
    """A histogram tells no percentile beyond its last bucket."""
    longest = GatewayConfig().request_timeout_seconds
    for metric in (telemetry.TTFT, telemetry.E2E, telemetry.QUEUE):
        assert metric.buckets[-1] >= longest, metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_metrics_of_requests_name_the_model() -> None:
    requests = set(telemetry.REQUEST) - {telemetry.RETRIED}
    assert [metric.name for metric in requests if "model" not in metric.labels] == []


def test_a_label_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no label 'tenant'"):
        queries.rate(telemetry.REQUESTS, ("tenant",))
    with pytest.raises(ValueError, match="no label 'kind'"):
        queries.level(telemetry.KV_BYTES, kind="slots")
    with pytest.raises(ValueError, match="is a gauge, not a counter"):
        queries.rate(telemetry.KV_BYTES)


def test_promql_parses(boards: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: expressions are linted but not parsed")
    rules = [
        {"record": f"warmkv:panel{number}", "expr": plain(expr)} for number, (_, expr) in enumerate(expressions(boards))
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout


def grows(metric: telemetry.Metric, per_second: float, **labels: str) -> dict[str, str]:
    """A counter on one process, over ten minutes."""
    pairs = ", ".join(f'{k}="{v}"' for k, v in {"application": "warmkv", **labels}.items())
    return {"series": f"{metric.exported}{{{pairs}}}", "values": f"0+{per_second * 15}x40"}


@promtool
def test_what_prometheus_computes(tmp_path: Path) -> None:
    # Per second: 100 prompt tokens under snapkv, 75 of them reused and read, 15 computed, 10 written; 20 under full,
    # none reused, whose counter of cached tokens therefore does not exist. Input costs 3 dollars per million.
    t, million = telemetry, 1e6
    series = [
        grows(t.TOKENS, 15, policy="snapkv", kind="input"),
        grows(t.TOKENS, 75, policy="snapkv", kind="read"),
        grows(t.TOKENS, 10, policy="snapkv", kind="write_5m"),
        grows(t.TOKENS, 40, policy="snapkv", kind="output"),
        grows(t.CACHED_TOKENS, 50, policy="snapkv", WorkerId="a"),
        grows(t.CACHED_TOKENS, 25, policy="snapkv", WorkerId="b"),
        grows(t.TOKENS, 20, policy="full", kind="input"),
        grows(t.DOLLARS, 35 * 3 / million, part="input"),
        grows(t.DOLLARS, 75 * 3 * 0.1 / million, part="read"),
        grows(t.DOLLARS, 10 * 3 * 1.25 / million, part="write"),
        grows(t.DOLLARS, 40 * 15 / million, part="output"),
        grows(t.ROUTED, 3, reason="warm"),
        grows(t.ROUTED, 1, reason="load"),
    ]
    saved = (120 * 3 - (35 * 3 + 75 * 0.3 + 10 * 3.75)) * 3600 / million
    boards = documents()
    by_title = {panel["title"]: panel for panel in panels(boards["overview"])}

    def check(title: str, expected: dict[str, float]) -> dict[str, Any]:
        expression = plain(by_title[title]["targets"][0]["expr"])
        samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
        return {"expr": f"round({expression}, 1e-6)", "eval_time": "5m", "exp_samples": samples}

    checks = [
        check("Cache hit rate", {'{application="warmkv"}': 0.625}),
        check("Hit rate by token", {'{policy="snapkv"}': 0.75, '{policy="full"}': 0.0}),
        check("Saved per hour", {'{application="warmkv"}': round(saved, 6)}),
        check("Share of routing reasons", {'{reason="warm"}': 0.75, '{reason="load"}': 0.25}),
    ]
    test = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": checks}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps(test))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout


@promtool
def test_every_query_returns_data(boards: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    # One process of each application records every metric with every label; what a query joins must then match up.
    values = {"kind": ("input", "read", "write_5m", "output"), "part": ("input", "read", "write", "output")}
    series = []
    for metric in telemetry.ALL:
        combinations: list[dict[str, str]] = [{"replica": "r1"}]
        for label in metric.labels:
            combinations = [{**c, label: value} for c in combinations for value in values.get(label, ("x", "y"))]
        for labels in combinations:
            if metric.kind == "histogram":
                for bound in (*metric.buckets, "+Inf"):
                    bucket = grows(metric, 1, le=str(bound), **labels)
                    series.append({**bucket, "series": bucket["series"].replace("{", "_bucket{", 1)})
            else:
                series.append(grows(metric, 1, **labels))
    checks = [
        {"expr": f"count({plain(expr)}) > bool 0", "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for _, expr in expressions(boards)
    ]
    test = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": checks}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps(test))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout


def test_builds_do_not_differ() -> None:
    assert json.dumps(documents()) == json.dumps(documents())
    assert documents()["overview"]["uid"] == "warmkv-overview"

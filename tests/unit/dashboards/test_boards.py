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

from tests import grafana
from tests.polling import PATIENCE
from warmkv import telemetry
from warmkv.config import GatewayConfig
from warmkv.dashboards import metrics_page, queries
from warmkv.dashboards.boards import BOARDS
from warmkv.dashboards.build import build_all, documents
from warmkv.platform.whatif.candidates import NOW

ROOT = Path(__file__).parents[3]
EXPORTED = {metric.exported: metric for metric in telemetry.ALL}
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@pytest.fixture(scope="module")
def boards() -> dict[str, dict[str, Any]]:
    return documents()


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] not in ("row", "text")]


def graphs(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Panels that read Prometheus."""
    return [panel for panel in panels(board) if panel["type"] != "table"]


def expressions(boards: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for board in boards.values():
        for panel in graphs(board):
            for target in panel["targets"]:
                yield f"{board['title']}: {panel['title']} {target['refId']}", target["expr"]


def events(boards: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Queries of what is marked on the graphs, the same on all dashboards."""
    (found,) = {
        tuple((entry["name"], entry["expr"]) for entry in board["annotations"]["list"] if entry.get("expr"))
        for board in boards.values()
    }
    return dict(found)


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
        assert variables["api"]["query"] == "yesoreyeram-infinity-datasource"
        assert {"application", "policy", "model", "tenant"} <= set(variables)
        for panel in graphs(board):
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]


def test_variables_that_no_panel_names_are_hidden(boards: dict[str, dict[str, Any]]) -> None:
    for board in boards.values():
        named = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
        for variable in board["templating"]["list"]:
            assert (variable["name"] in named) == (not variable.get("hide")), (board["title"], variable["name"])


def test_every_board_leads_to_the_others_and_says_what_is_healthy(boards: dict[str, dict[str, Any]]) -> None:
    assert len({board["uid"] for board in boards.values()}) == len(boards) == 7
    for board in boards.values():
        (link,) = board["links"]
        assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == (
            "dashboards",
            ["warmkv"],
            True,
            True,
        )
        assert "warmkv" in board["tags"]
        first = board["panels"][0]
        assert first["type"] == "text"
        for page in re.findall(r"`docs/(\w+\.md)", first["options"]["content"]):
            assert (ROOT / "docs" / page).exists()


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
        for panel in graphs(board):
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_annotations_show_changes(boards: dict[str, dict[str, Any]]) -> None:
    for board in boards.values():
        tagged = [entry.get("target", {}).get("tags") for entry in board["annotations"]["list"]]
        assert ["warmkv"] in tagged
    assert list(events(boards)) == ["Configuration", "Deploy", "Fault"]


def test_tables_read_the_control_api_and_their_actions_ask_first(boards: dict[str, dict[str, Any]]) -> None:
    found = {}
    for board in boards.values():
        for panel in panels(board):
            actions = grafana.actions(panel)
            assert panel["type"] == "table" or not actions
            if panel["type"] == "table":
                assert panel["datasource"] == {"type": "yesoreyeram-infinity-datasource", "uid": "${api}"}
                columns = [column["text"] for column in panel["targets"][0]["columns"]]
                assert len(set(columns)) == len(columns)
                assert ("actions" in columns) == bool(actions)
            for action in actions:
                found[action["title"]] = action
                assert action["type"] == "fetch"
                assert action["confirmation"].endswith("?")
                assert ["x-api-key", "$key"] in action["fetch"]["headers"]
                text = json.dumps(action["fetch"]) + action["confirmation"]
                asked = {variable["key"] for variable in action["variables"]}
                assert set(re.findall(r"\$(\w+)", text)) == asked, action["title"]  # nothing more, nothing less
                assert set(re.findall(r"\${__data\.fields\.([^}]+)}", text)) <= set(columns), action["title"]
                assert action["fetch"]["url"].startswith("${gateway}/v1/warmkv/policy")
    assert list(found) == ["Apply candidate", "Set TTL", "Set budget", "Roll back", "Roll back to the start", "Change"]


UNITS = re.compile(r"short|none|s|dthms|dateTimeAsIso|bytes|Bps|percentunit|currencyUSD|reqps|cpm|si:[a-z/]+")


def test_units_are_grafana_s(boards: dict[str, dict[str, Any]]) -> None:
    """Grafana shows one that it does not know behind the bare number. `make pictures` asks its own list."""
    for board in boards.values():
        for panel in panels(board):
            assert all(UNITS.fullmatch(unit) for unit in grafana.units(panel)), panel["title"]


def test_panels_fill_their_rows(boards: dict[str, dict[str, Any]]) -> None:
    for board in boards.values():
        lines: dict[int, list[dict[str, int]]] = {}
        for panel in board["panels"]:
            lines.setdefault(panel["gridPos"]["y"], []).append(panel["gridPos"])
        for line in lines.values():
            assert sum(place["w"] for place in line) == 24, (board["title"], line)
            assert len({place["h"] for place in line}) == 1, (board["title"], line)


def test_numbers_have_thresholds_of_their_own(boards: dict[str, dict[str, Any]]) -> None:
    """Without any, Grafana shows whatever is above 80 in red: bytes, dollars, requests."""
    numbers = [panel for board in boards.values() for panel in panels(board) if panel["type"] == "stat"]
    steps = {panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"] for panel in numbers}
    assert steps["KV memory"] == [{"color": "blue", "value": None}]
    for title, found in steps.items():
        assert found[0]["value"] is None, title
        assert 80 not in [step["value"] for step in found], title


def test_legends_name_labels_that_their_series_have(boards: dict[str, dict[str, Any]]) -> None:
    for board in boards.values():
        for panel in graphs(board):
            for target in panel["targets"]:
                (by, *_) = re.findall(r"sum by \(([\w, ]*)\)", target["expr"])
                named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                assert named <= set(by.split(", ")), (panel["title"], target["legendFormat"])
            fixed = [target["legendFormat"] for target in panel["targets"]]
            assert len(set(fixed)) == len(fixed), f"{panel['title']}: two lines of one name"


def test_what_a_healthy_service_lacks_is_told(boards: dict[str, dict[str, Any]]) -> None:
    rare = (telemetry.ERRORS, telemetry.REJECTED, telemetry.FAILED, telemetry.PREEMPTED, telemetry.DROPPED_LINES)
    rare += (telemetry.RETRIED, telemetry.TENANTS_READ, telemetry.TENANTS_REFUSED, telemetry.WHATIF_QUALITY)
    rare += (telemetry.BLOCK_IDLE, telemetry.LOST_BLOCKS)
    for metric in (*rare, *telemetry.TRANSFER):
        for board in boards.values():
            for panel in graphs(board):
                if metric.exported in panel["targets"][0]["expr"]:
                    assert panel["fieldConfig"]["defaults"].get("noValue"), panel["title"]


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
    shown = " ".join([*(expression for _, expression in expressions(boards)), *events(boards).values()])
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
    with pytest.raises(ValueError, match="no label 'tier'"):
        queries.rate(telemetry.REQUESTS, ("tier",))
    with pytest.raises(ValueError, match="no label 'kind'"):
        queries.level(telemetry.KV_BYTES, kind="slots")
    with pytest.raises(ValueError, match="no bucket up to 3"):
        queries.within(3, telemetry.TTFT)
    with pytest.raises(ValueError, match="is a gauge, not a counter"):
        queries.rate(telemetry.KV_BYTES)


def test_promql_parses(boards: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: expressions are linted but not parsed")
    rules = [
        {"record": f"warmkv:panel{number}", "expr": grafana.filled(expr)}
        for number, expr in enumerate([*(expr for _, expr in expressions(boards)), *events(boards).values()])
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
        expression = grafana.filled(by_title[title]["targets"][0]["expr"])
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
    values = {
        "kind": ("input", "read", "write_5m", "output"),
        "part": ("input", "read", "write", "output"),
        "use": ("slots", "workspace", "store"),
        "candidate": (NOW, "x"),
        "reason": ("load", "x"),
    }
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
                for part in ("sum", "count"):
                    one = grows(metric, 1, **labels)
                    series.append({**one, "series": one["series"].replace("{", f"_{part}{{", 1)})
            else:
                series.append(grows(metric, 1, **labels))
                if metric is telemetry.WHATIF_RANK:
                    series[-1]["values"] = "1x40"
    checks = [
        {
            "expr": f"count({grafana.filled(expr)}) > bool 0",
            "eval_time": "5m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
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


@promtool
def test_events_are_marked_when_they_happen(boards: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Every 15 s: a change at 2m, a replica from 4m on, its first fault at 6m; before and between, nothing."""
    t = telemetry

    def one(metric: telemetry.Metric, values: str, **labels: str) -> dict[str, str]:
        pairs = ", ".join(f'{k}="{v}"' for k, v in {"application": "warmkv", **labels}.items())
        return {"series": f"{metric.exported}{{{pairs}}}", "values": values}

    series = [
        one(t.LIVE_CONFIG_VERSION, "3x7 4x40", replica="g", deployment="gateway"),
        one(t.LIVE_CONFIG_CHANGE, "1x7", replica="g", version="3", who="ann", what="a", why="b"),
        one(t.LIVE_CONFIG_CHANGE, "_x8 1x40", replica="g", version="4", who="autopilot", what="ttl", why="it pays"),
        one(t.LIVE_CONFIG_VERSION, "_x20 4x28", replica="g2", deployment="gateway"),  # one that only starts
        one(t.LIVE_CONFIG_CHANGE, "_x20 1x28", replica="g2", version="4", who="autopilot", what="ttl", why="it pays"),
        one(t.DECODING, "0x50", replica="r1", deployment="replica"),
        one(t.DECODING, "_x16 0x40", replica="r2", deployment="replica"),
        one(t.FAILED, "0+1x50", fault="request"),
        one(t.FAILED, "_x24 1x20", fault="memory"),
    ]
    happens = {
        "Configuration": {
            "2m": '{application="warmkv", version="4", who="autopilot", what="ttl", why="it pays"}',
        },
        "Deploy": {"4m15s": '{application="warmkv", deployment="replica"}'},
        "Fault": {"6m15s": '{application="warmkv", fault="memory"}'},
    }
    told = "application, deployment, fault, version, who, what, why"
    checks = []
    for name, expression in events(boards).items():
        for at in ("1m30s", "2m", "4m15s", "6m15s", "9m"):
            labels = happens[name].get(at)
            samples = [{"labels": labels, "value": 1}] if labels else []
            checks.append(
                {
                    "expr": f"count by ({told}) ({grafana.filled(expression)})",
                    "eval_time": at,
                    "exp_samples": samples,
                }
            )
    document = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": checks}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps(document))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout


def test_builds_do_not_differ() -> None:
    assert json.dumps(documents()) == json.dumps(documents())
    assert documents()["overview"]["uid"] == "warmkv-overview"

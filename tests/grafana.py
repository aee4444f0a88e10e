"""What Grafana does with a dashboard: asks data sources, makes rows of answers, sends actions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests
from jsonata import Jsonata

from tests.polling import PATIENCE
from warmkv.dashboards.build import documents
from warmkv.dashboards.panels import ACTIONS
from warmkv.platform.whatif.candidates import NOW

STEP = 15  # seconds: the least between two points from a Prometheus that Grafana was not told how often it scrapes
RATE_INTERVAL = "1m"  # four of these, which Grafana puts for $__rate_interval
CHOSEN = {"application": ".*", "policy": ".*", "model": ".*", "tenant": ".*", "candidate": NOW}
"""What variables that filter queries are, where the viewer has chosen nothing."""


@dataclass(frozen=True)
class ActionRequest:
    """A request as the viewer's browser sends it."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: Any
    confirmation: str


def tables() -> dict[str, dict[str, Any]]:
    """Return the panels with tables of all dashboards, by title."""
    boards = documents().values()
    return {panel["title"]: panel for board in boards for panel in board["panels"] if panel["type"] == "table"}


def rows(panel: Mapping[str, Any], answer: Any) -> list[dict[str, Any]]:
    """Return the rows that the Infinity data source makes of an answer, with the columns that the panel lists."""
    (target,) = panel["targets"]
    found = Jsonata(target["root_selector"]).evaluate(json.loads(json.dumps(answer)))
    kinds = {"string": str, "timestamp": str, "number": (int, float), "boolean": bool}
    for row in found:
        for column in target["columns"]:
            value = row.get(column["selector"])
            assert value is None or isinstance(value, kinds[column["type"]]), (column, value)
    return [{column["text"]: row.get(column["selector"]) for column in target["columns"]} for row in found]


def actions(panel: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the actions that a table shows as buttons in a column of their own."""
    overrides = panel["fieldConfig"]["overrides"]
    found = [rule["properties"] for rule in overrides if rule["matcher"] == {"id": "byName", "options": ACTIONS}]
    return [action for rule in found for one in rule if one["id"] == "actions" for action in one["value"]]


def units(panel: Mapping[str, Any]) -> list[str]:
    """Return the units of a panel and of its columns."""
    rules = panel["fieldConfig"]["overrides"]
    columns = [one["value"] for rule in rules for one in rule["properties"] if one["id"] == "unit"]
    return [panel["fieldConfig"]["defaults"]["unit"], *columns]


def request(
    panel: Mapping[str, Any], title: str, row: Mapping[str, Any], asked: Mapping[str, str], variables: Mapping[str, str]
) -> ActionRequest:
    """Return what an action of a row sends: first what the viewer was asked for, then fields and variables."""
    (action,) = (one for one in actions(panel) if one["title"] == title)
    assert {variable["key"] for variable in action["variables"]} == set(asked)

    def filled(text: str) -> str:
        text = re.sub(r"\$(\w+)", lambda match: asked.get(match[1], match[0]), text)
        return "".join(_filled(text, row, variables))

    fetch = action["fetch"]
    headers = {filled(name): filled(value) for name, value in fetch["headers"]}
    body = json.loads(filled(fetch["body"]))
    sent = {**headers, "X-Grafana-Action": "1"}
    return ActionRequest(fetch["method"], filled(fetch["url"]), sent, body, filled(action["confirmation"]))


def _filled(text: str, row: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[str]:
    for part in re.split(r"(\${[^}]+})", text):
        if part.startswith("${__data.fields."):
            yield str(row[part.removeprefix("${__data.fields.").removesuffix("}")])
        elif part.startswith("${"):
            yield variables[part[2:-1]]
        else:
            yield part


# --- Prometheus


@dataclass(frozen=True)
class Series:
    """A line of a graph: its legend, and milliseconds and values of its points."""

    legend: str
    labels: Mapping[str, str]
    times: Sequence[int]
    values: Sequence[float | None]


def filled(expression: str) -> str:
    """A query as Prometheus gets it, where the viewer has chosen nothing."""
    expression = re.sub(rf"\$({'|'.join(CHOSEN)})\b", lambda match: CHOSEN[match[1]], expression)
    return expression.replace("$__rate_interval", RATE_INTERVAL)


def expressions() -> dict[str, str]:
    """Return the queries of all panels, each with its place on a dashboard."""
    return {
        target["expr"]: f"{board['title']}: {panel['title']} {target['refId']}"
        for board in documents().values()
        for panel in board["panels"]
        for target in panel.get("targets", [])
        if "expr" in target
    }


def events() -> set[str]:
    """Return the queries of what is marked on all graphs."""
    return {one["expr"] for board in documents().values() for one in board["annotations"]["list"] if one.get("expr")}


def series(prometheus: str, target: Mapping[str, Any], start: int, end: int, step: int = STEP) -> list[Series]:
    """What a query of a panel, or of annotations, shows from `start` to `end`, seconds since 1970."""
    query = {"query": filled(target["expr"]), "start": start, "end": end, "step": step}
    answer: Any = requests.post(f"{prometheus}/api/v1/query_range", data=query, timeout=PATIENCE).json()
    assert answer["status"] == "success", (target["expr"], answer)
    found = []
    for result in answer["data"]["result"]:
        labels, points = result["metric"], result["values"]
        times = [round(1000 * at) for at, _ in points]
        values = [None if text == "NaN" else float(text) for _, text in points]
        found.append(Series(legend(target.get("legendFormat", ""), labels), labels, times, values))
    return found


def legend(template: str, labels: Mapping[str, str]) -> str:
    """A legend with the labels that it names; one that a series lacks is left out."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), template)

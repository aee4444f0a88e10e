"""What Grafana does with a dashboard's tables and actions: rows from JSON, and requests from a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jsonata import Jsonata

from warmkv.dashboards.build import documents


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
    kinds = {"string": str, "number": (int, float), "boolean": bool}
    for row in found:
        for column in target["columns"]:
            value = row.get(column["selector"])
            assert value is None or isinstance(value, kinds[column["type"]]), (column, value)
    return [{column["text"]: row.get(column["selector"]) for column in target["columns"]} for row in found]


def request(
    panel: Mapping[str, Any], title: str, row: Mapping[str, Any], asked: Mapping[str, str], variables: Mapping[str, str]
) -> ActionRequest:
    """Return what an action of a row sends: first what the viewer was asked for, then fields and variables."""
    (action,) = (one for one in panel["fieldConfig"]["defaults"]["actions"] if one["title"] == title)
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

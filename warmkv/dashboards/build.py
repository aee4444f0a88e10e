"""Dashboards as the JSON that Grafana loads, alerts as the YAML that Prometheus and its operator load.

The same text on every machine, so that a diff shows a change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from warmkv.dashboards import alerts
from warmkv.dashboards.boards import BOARDS

RULES: Mapping[str, Callable[[], dict[str, Any]]] = {"alerts": alerts.groups, "prometheusrule": alerts.prometheus_rule}
HEAD = "# Written by `warmkv dashboards build` from warmkv/dashboards/alerts.py.\n"


def documents() -> dict[str, dict[str, Any]]:
    """Return every dashboard by its file name without `.json`, as plain values."""
    return {board.name: json.loads(json.dumps(board.build(), cls=JSONEncoder)) for board in BOARDS}


def text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def files() -> dict[str, str]:
    """Return the text of every file by its name."""
    rules = {name: HEAD + yaml.safe_dump(make(), sort_keys=False, width=120) for name, make in RULES.items()}
    boards = {f"{name}.json": text(document) for name, document in documents().items()}
    return boards | {f"{name}.yaml": rule for name, rule in rules.items()}


def build_all(folder: Path) -> list[Path]:
    """Write every dashboard and the alerts into a folder, which is made if missing; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in files().items():
        path = folder / name
        path.write_text(content, encoding="utf-8")
        written.append(path)
    return written

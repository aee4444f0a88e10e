"""Dashboards as the JSON that Grafana loads: the same text on every machine, so that a diff shows a change."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from warmkv.dashboards import overview

BOARDS: Mapping[str, Callable[[], Any]] = {"overview": overview.build}


def documents() -> dict[str, dict[str, Any]]:
    """Every dashboard by its file name without `.json`, as plain values."""
    return {name: json.loads(json.dumps(build(), cls=JSONEncoder)) for name, build in BOARDS.items()}


def text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def build_all(folder: Path) -> list[Path]:
    """Write every dashboard into a folder, which is made if missing; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, document in documents().items():
        path = folder / f"{name}.json"
        path.write_text(text(document), encoding="utf-8")
        written.append(path)
    return written

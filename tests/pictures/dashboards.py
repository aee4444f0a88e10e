"""Pictures of the dashboards: `make pictures` shows the service at work to Prometheus, turns it, and draws what it saw.

It is collected only where it is named: it takes a quarter of an hour and a machine with nothing else to do.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from PIL import Image
from typer.testing import CliRunner

from tests import grafana, rendering
from tests.browser import browsing
from tests.polling import PATIENCE, until
from warmkv.cli import app
from warmkv.config import load
from warmkv.dashboards.build import documents
from warmkv.observe import SETTINGS, Observed, observing

RATE, SEED = 3.0, 1
HOUR = 3600.0
GRID = {
    "prefix_cache.default_ttl": ["30s", "5m", "1h"],
    "prefix_cache.memory_bytes": ["64MiB", "128MiB", "256MiB"],
    "compression.policy": ["full", "snapkv@0.2"],
}


class Operator:
    """Somebody before the dashboard "What-if and tuning", who clicks there."""

    def __init__(self, seen: Observed) -> None:
        self.seen = seen

    def answered(self) -> float:
        """How many requests were answered so far."""
        query = {"query": "sum(ray_warmkv_requests_total)"}
        answer = requests.get(f"{self.seen.prometheus}/api/v1/query", params=query, timeout=PATIENCE).json()
        return sum(float(sample["value"][1]) for sample in answer["data"]["result"])

    def read(self, path: str) -> Any:
        """What the control API says, as Grafana's server reads it."""
        headers = {"x-api-key": self.seen.operator_key}
        return requests.get(f"{self.seen.service}{path}", headers=headers, timeout=PATIENCE).json()

    def click(self, table: str, action: str, take: Callable[[dict[str, Any]], bool], **asked: str) -> None:
        """Send an action of the first row that fits."""
        panel = grafana.tables()[table]
        row = next(row for row in grafana.rows(panel, self.read(panel["targets"][0]["url"])) if take(row))
        asked["key"] = self.seen.operator_key
        sent = grafana.request(panel, action, row, asked, {"gateway": self.seen.service})
        answer = requests.request(sent.method, sent.url, json=sent.body, headers=dict(sent.headers), timeout=PATIENCE)
        answer.raise_for_status()


def applies(row: dict[str, Any]) -> bool:
    """A candidate with a longer TTL, which needs no restart."""
    return row["candidate"].startswith("ttl") and row["candidate"] != "ttl-half" and not row["restart"]


def swept(log: Path, folder: Path) -> Any:
    """The results of a sweep over what the service was asked."""
    copy, grid = folder / "trace.jsonl", folder / "grid.yaml"
    copy.write_bytes(log.read_bytes())  # the service still writes it
    grid.write_text(yaml.safe_dump(GRID))
    settings = [f"--set={setting}" for setting in SETTINGS]
    run = CliRunner().invoke(app, ["sweep", str(copy), "--grid", str(grid), "--out", str(folder / "sweep"), *settings])
    assert run.exit_code == 0, run.output
    return json.loads((folder / "sweep" / "results.json").read_text())


def draw(operator: Operator, results: Any, seconds: tuple[float, float], folder: Path, profile: Path) -> None:
    """Draw all dashboards over the time, and hold every panel to have data, or a word for what it lacks."""

    def table(url: str) -> Any:
        return operator.read(url) if url.startswith("/") else results

    profile.mkdir()
    with rendering.served(rendering.BUILT) as url, browsing(profile) as page:
        for name, board in documents().items():
            rendering.draw(page, url, rendering.shown(board, operator.seen.prometheus, table, seconds))
            configured = {panel["title"]: panel.get("fieldConfig", {}).get("defaults", {}) for panel in board["panels"]}
            assert [title for title in rendering.empty(page) if "noValue" not in configured[title]] == [], name
            assert rendering.unknown_units(page, board) == [], name
            picture = folder / f"{name}.png"
            rendering.picture(page, picture)
            drawn = Image.open(picture).convert("RGB")  # as a palette it is a third as large
            drawn.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(picture, optimize=True)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
@pytest.mark.timeout(2 * HOUR)
def test_pictures(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = Path(request.config.getoption("pictures")) / "dashboards"
    folder.mkdir(exist_ok=True)
    rendering.build()
    log = tmp_path / "access.jsonl"
    with observing(load(flags=[*SETTINGS, f"gateway.access_log={log}"], environ={}), RATE, SEED) as seen:
        start, operator = time.time(), Operator(seen)

        def asked(number: int) -> None:
            until(lambda: operator.answered() >= number, f"{number} requests were answered", seconds=HOUR)

        asked(600)
        operator.click("What other settings would do", "Apply candidate", applies)
        asked(1100)
        operator.click(
            "Live settings",
            "Change",
            lambda row: row["setting"] == "routing.load_weight",
            value="16",
            why="replicas at equal load",
        )
        asked(1300)
        operator.click("Versions", "Roll back", lambda row: row["version"] == 1, why="prompts got colder")
        asked(1600)
        draw(operator, swept(log, tmp_path), (start, time.time()), folder, tmp_path / "browser")

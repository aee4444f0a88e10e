"""Dashboards drawn with Grafana's components, outside Grafana (dashboards/render), and pictures of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import grafana
from tests.browser import Page
from tests.polling import until

ROOT = Path(__file__).parents[1]
SOURCE, BUILT = ROOT / "dashboards" / "render", ROOT / "build" / "render"
FONTS = {400: "Inter-Regular.woff2", 500: "Inter-Medium.woff2"}
WIDTH = 1440
PAGE_SECONDS = 60.0  # only a failure takes so long
HTML = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="page.css"><div id="page"></div>
<script>window.__grafana_public_path__ = "/";</script><script src="page.js"></script>"""


def build() -> None:
    """Install what package-lock.json names, and bundle the page. Skips without Node."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here (Debian: apt-get install nodejs npm)")
    modules = SOURCE / "node_modules"
    installed = modules / ".package-lock.json"  # npm writes it at the end
    if not installed.exists() or installed.stat().st_mtime < (SOURCE / "package-lock.json").stat().st_mtime:
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=SOURCE, check=True)
    subprocess.run(["npm", "run", "--silent", "build"], cwd=SOURCE, check=True)
    shutil.copytree(modules / "@grafana/ui/dist/public", BUILT / "build", dirs_exist_ok=True)  # icons
    fonts = BUILT / "fonts" / "inter"  # where Grafana's style looks for them
    fonts.mkdir(parents=True, exist_ok=True)
    for weight, name in FONTS.items():
        shutil.copy(modules / f"@fontsource/inter/files/inter-latin-{weight}-normal.woff2", fonts / name)
    (BUILT / "index.html").write_text(HTML)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder to the browser; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shown(
    dashboard: Mapping[str, Any], prometheus: str, table: Callable[[str], Any], seconds: tuple[float, float]
) -> dict[str, Any]:
    """What the page draws: the dashboard, and what its queries found. `table` reads JSON from an address."""
    start, end = (int(at) // grafana.STEP * grafana.STEP for at in seconds)  # as Grafana aligns them
    data: dict[int, Any] = {}
    for panel in dashboard["panels"]:
        targets = panel.get("targets", [])
        if panel["type"] == "table":
            (target,) = targets
            rows = grafana.rows(panel, table(target["url"]))
            columns = [(column["text"], column["type"]) for column in target["columns"]]
            cells = [{"name": name, "type": kind, "values": [row[name] for row in rows]} for name, kind in columns]
            data[panel["id"]] = {"columns": cells}
        elif targets:
            lines = [line for target in targets for line in grafana.series(prometheus, target, start, end)]
            data[panel["id"]] = {"series": [asdict(line) for line in lines]}
    variables = [one for one in dashboard["templating"]["list"] if one["name"] in grafana.CHOSEN and not one["hide"]]
    return {
        "dashboard": dashboard,
        "from": 1000 * start,
        "to": 1000 * end,
        "step": 1000 * grafana.STEP,
        "width": WIDTH,
        "variables": [[one["label"], one["current"]["text"]] for one in variables],
        "data": data,
        "marks": marks(dashboard, prometheus, start, end),
    }


def marks(dashboard: Mapping[str, Any], prometheus: str, start: int, end: int) -> list[dict[str, Any]]:
    """Where annotations mark something, as Grafana reads them off a query: from a point to the last that follows it."""
    found: list[dict[str, Any]] = []
    for query in dashboard["annotations"]["list"]:
        for line in grafana.series(prometheus, query, start, end) if query.get("expr") else ():
            last = -1.0
            for time, value in zip(line.times, line.values, strict=True):
                if not value:
                    continue
                if time - last > 1000 * grafana.STEP:
                    found.append({"from": time, "to": time, "color": query["iconColor"], "name": query["name"]})
                found[-1]["to"] = last = time
    return found


def empty(page: Page) -> list[str]:
    """Titles of the panels that show no data."""
    panels = "[...document.querySelectorAll('.panel')].filter(one => one.querySelector('.no-data'))"
    titles: list[str] = page.value(f"{panels}.map(one => one.dataset.title)")
    return titles


def unknown_units(page: Page, dashboard: Mapping[str, Any]) -> list[str]:
    """Units that Grafana's own list lacks."""
    used = {unit for panel in dashboard["panels"] if "fieldConfig" in panel for unit in grafana.units(panel)}
    found: list[str] = page.value(f"unknownUnits({json.dumps(sorted(used))})")
    return found


def draw(page: Page, url: str, what: Mapping[str, Any]) -> None:
    """Draw a dashboard in the browser, from a file in the folder that is served."""
    (BUILT / "shown.json").write_text(json.dumps(what))
    page.look(WIDTH, 1000, "dark")
    page.open(f"{url}/index.html")
    page.value("show('shown.json')")
    described = sum("description" in panel for panel in what["dashboard"]["panels"])
    rows = sum(panel["type"] == "row" for panel in what["dashboard"]["panels"])
    icons = "document.querySelectorAll('.panel svg[data-testid=icon-info-circle], .heading svg').length"
    until(lambda: page.value(icons) == described + rows, "every panel is drawn", seconds=PAGE_SECONDS)


def picture(page: Page, path: Path) -> None:
    """Write the whole page as PNG."""
    page.look(WIDTH, int(page.value("document.getElementById('page').offsetHeight")), "dark")
    page.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    page.picture(path)

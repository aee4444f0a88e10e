"""The dashboards: which rows each has, their variables and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableOption, VariableRefresh, VariableSort

from warmkv import telemetry
from warmkv.dashboards.panels import DATASOURCE, Row
from warmkv.dashboards.rows import memory, money, prefix_cache, routing, traffic, tuning

TAG = "warmkv"  # of the dashboards, and of the annotations they show
GRAFANA = common.DataSourceRef(type_val="grafana", uid="-- Grafana --")  # Grafana's own store of annotations


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. Its `name` is that of its file, and with `warmkv-` in front its uid."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]

    def build(self) -> Any:
        """Return the dashboard as the SDK's object; `warmkv.dashboards.build` writes it as JSON."""
        board = (
            dashboard.Dashboard(self.title)
            .uid(f"warmkv-{self.name}")
            .description(self.description)
            .tags([TAG])
            .timezone("browser")
            .time("now-1h", "now")
            .refresh("10s")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
            .with_variable(_variable("application", "Application", telemetry.REQUESTS))
            .with_variable(_variable("policy", "Compression policy", telemetry.REQUESTS))
            .with_variable(_variable("model", "Model", telemetry.REQUESTS))
            .annotation(_annotation("Annotations & Alerts", "dashboard", []).built_in(1))
            .annotation(_annotation("Changes of warmkv", "tags", [TAG]))
        )
        numbers = count(1)
        for row in self.rows:
            row.add_to(board, numbers)
        return board.build()


def _variable(label: str, title: str, metric: telemetry.Metric) -> Any:
    """Build a variable of a label's present values; all of them unless the viewer picks some."""
    return (
        dashboard.QueryVariable(label)
        .label(title)
        .datasource(DATASOURCE)
        .query(f"label_values({metric.exported}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _annotation(name: str, kind: str, tags: list[str]) -> Any:
    target = dashboard.AnnotationTarget().type(kind).tags(tags).match_any(False).limit(100)
    return dashboard.AnnotationQuery().name(name).datasource(GRAFANA).enable(True).icon_color("blue").target(target)


BOARDS = (
    Board(
        "overview",
        "warmkv overview",
        "Serving with compressed KV caches and prefix reuse: traffic, cache, latency, memory, money.",
        (
            traffic.AT_A_GLANCE,
            traffic.TRAFFIC,
            traffic.ERRORS,
            prefix_cache.PREFIX_CACHE,
            traffic.LATENCY,
            memory.KV_MEMORY,
            routing.ROUTING,
            routing.TRANSFER,
            tuning.LIVE_CONFIGURATION,
            tuning.WHAT_IF,
            money.MONEY,
        ),
    ),
)

"""The dashboards: which rows each has, their variables and annotations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from warmkv import telemetry
from warmkv.dashboards import events
from warmkv.dashboards.panels import DATASOURCE, INFINITY, PanelRow, TextPanel
from warmkv.dashboards.rows import memory, money, prefix_cache, routing, simulation, traffic, tuning
from warmkv.platform.whatif.candidates import NOW

TAG = "warmkv"  # of the dashboards, and of the annotations they show
GRAFANA = common.DataSourceRef(type_val="grafana", uid="-- Grafana --")  # Grafana's own store of annotations

GATEWAY = "http://127.0.0.1:8400"
RESULTS = "http://127.0.0.1:8000/results.json"


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. Its `name` is that of its file, and with `warmkv-` in front its uid."""

    name: str
    title: str
    description: str
    healthy: str  # Markdown: what a healthy picture looks like
    rows: Sequence[PanelRow]
    candidates: bool = False  # the viewer chooses some of the what-if's

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
            .link(
                dashboard.DashboardLink("warmkv")
                .type(DashboardLinkType.DASHBOARDS)
                .tags([TAG])
                .as_dropdown(False)
                .include_vars(True)
                .keep_time(True)
            )
            .annotation(_annotation("Annotations & Alerts", "dashboard", []).built_in(1))
            .annotation(_annotation("Changes of warmkv", "tags", [TAG]))
        )
        for variable in self._variables():
            board.with_variable(variable)
        for event in events.EVENTS:
            board.annotation(event.build())
        numbers = count(1)
        board.with_panel(TextPanel("What a healthy picture looks like", self.healthy).build(next(numbers)))
        for row in self.rows:
            row.add_to(board, numbers)
        return _hide_unused(board.build())

    def _variables(self) -> Iterator[Any]:
        yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        yield _label("application", "Application", telemetry.REQUESTS)
        yield _label("policy", "Compression policy", telemetry.REQUESTS)
        yield _label("model", "Model", telemetry.REQUESTS)
        yield _label("tenant", "Tenant", telemetry.REQUESTS)
        if self.candidates:
            yield _label("candidate", "Candidates", telemetry.WHATIF_RANK).current(VariableOption(text=NOW, value=NOW))
        yield dashboard.DatasourceVariable("api").label("Control API").type(INFINITY)
        yield _address("gateway", "Gateway, for actions", GATEWAY)
        yield _address("results", "Results of a sweep", RESULTS)


def _hide_unused(board: Any) -> Any:
    """Hide the variables that no panel of a built dashboard names; its links still pass them on."""
    named = set(re.findall(r"\$\{?(\w+)", json.dumps(board.panels, cls=JSONEncoder)))
    for variable in board.templating.list_val:
        variable.hide = VariableHide.DONT_HIDE if variable.name in named else VariableHide.HIDE_VARIABLE
    return board


def _label(label: str, title: str, metric: telemetry.Metric) -> Any:
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


def _address(name: str, title: str, address: str) -> Any:
    """Build a variable into which the viewer writes an address."""
    option = VariableOption(text=address, value=address)
    return dashboard.TextBoxVariable(name).label(title).default_value(address).current(option)


def _annotation(name: str, kind: str, tags: list[str]) -> Any:
    target = dashboard.AnnotationTarget().type(kind).tags(tags).match_any(False).limit(100)
    return dashboard.AnnotationQuery().name(name).datasource(GRAFANA).enable(True).icon_color("blue").target(target)


BOARDS = (
    Board(
        "overview",
        "warmkv overview",
        "Serving with compressed KV caches and prefix reuse: traffic, cache, latency, memory, money.",
        "**Healthy:** requests end with `ok`, none is refused; the hit rate is as yesterday's at this hour; warm "
        "requests begin much sooner than cold ones; hardly anyone waits, and slots have room; all gateways have one "
        "version. More: `docs/operations.md#alerts`",
        (
            traffic.AT_A_GLANCE,
            traffic.TRAFFIC,
            traffic.LATENCY,
            prefix_cache.PREFIX_CACHE,
            memory.KV_MEMORY,
            routing.ROUTING,
            money.MONEY,
            traffic.ERRORS,
            tuning.LIVE_CONFIGURATION,
        ),
    ),
    Board(
        "prefix-cache",
        "warmkv prefix cache",
        "What prompts reuse, what is stored, how long it stays, and why prompts were cold.",
        "**Healthy:** more is read than written; blocks leave by their TTL, or are demoted to a lower tier, and few "
        "are evicted; blocks are idle longer before an eviction than the gap between reuses, so that memory, and the"
        " TTL, are long enough. More: `docs/prefix_cache.md`",
        (
            prefix_cache.PREFIX_CACHE,
            prefix_cache.STORED,
            prefix_cache.REUSE,
            prefix_cache.MISSES,
            prefix_cache.RESIDENCY,
        ),
    ),
    Board(
        "compression",
        "warmkv compression and memory",
        "What compression keeps and what it costs, and where the KV memory goes.",
        "**Healthy:** the ratio is what the policy's budget promises; compressing takes a small part of the time to "
        "the first token; slots are below their limit, or nobody waits. More: `docs/policies.md`",
        (memory.COMPRESSION, memory.LIMITS, memory.KV_MEMORY),
    ),
    Board(
        "routing",
        "warmkv routing and replicas",
        "Where requests go and why, whether the warm prefix was there, and what replicas do.",
        "**Healthy:** most decisions are `warm`, and `cold` only for new prompts; hardly any token is missing that was "
        "expected; routers are less than a second behind; replicas have about the same load. More: `docs/routing.md`",
        (routing.ROUTING, routing.PREDICTION, routing.REPLICAS, routing.TRANSFER, routing.DIRECTORY),
    ),
    Board(
        "cost",
        "warmkv cost and tenants",
        "What answers cost, by part, policy and tenant, and what the cache saves.",
        "**Healthy:** every tenant saves: one below 0 writes prefixes that nobody reads, with too short a TTL or in "
        "prompts whose beginning changes. More: `docs/tenants.md`",
        (money.MONEY, money.TENANTS),
    ),
    Board(
        "tuning",
        "warmkv what-if and tuning",
        "What other settings would do, on the service's own recent requests; apply one, see its effect, roll it back.",
        "**Healthy:** the model's error is small beside the gain of a candidate, and after an Apply the measured "
        "line goes to the predicted one; else Roll back. Needs `control.whatif` and the Infinity data source. More: "
        "`docs/tuning.md`",
        (tuning.CANDIDATES, tuning.WHAT_IF, tuning.SETTINGS, tuning.LIVE_CONFIGURATION),
        candidates=True,
    ),
    Board(
        "simulation",
        "warmkv simulation runs",
        "Results of `warmkv sweep`, read from the address of its results.json.",
        "**Read it so:** points on the front are beaten by no other in everything; take the cheapest whose TTFT p99 "
        "and quality you accept, and try it as a candidate. Serve the folder of a run, as by `python -m "
        "http.server`, and allow its host in the Infinity data source. More: `docs/simulator.md`",
        (simulation.SWEEP,),
    ),
)
